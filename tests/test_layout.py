import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import rjax
from rjax.layout import capacity_of
from rjax.regions import BIAS_LIKE, HALF_ROLES, ROLES, Region, Role
from rjax.state import half_copy, views

FP16 = rjax.Config(precision="fp16", optimizer=rjax.optim.adam())
# Bit patterns that arithmetic would change: NaN payloads, -0, subnormals, extremes.
SPECIAL_BITS = [
    0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x807FFFFF,
    0x007FFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00800000,
]  # fmt: skip

names = st.text(alphabet="abkns0129_", min_size=1, max_size=4)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
leaves = st.one_of(shapes, shapes, shapes, st.none())
trees = st.recursive(
    st.dictionaries(names, leaves.map(lambda s: ("leaf", s)), max_size=4),
    lambda inner: st.one_of(
        st.dictionaries(names, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=6,
)
params_of_roles = st.builds(
    rjax.Param,
    role=st.sampled_from([None, *ROLES]),
    precision=st.sampled_from([None, "half", "float32"]),
    decay=st.sampled_from([None, True, False]),
    trainable=st.sampled_from([None, True, True, False]),
)


def _is_leaf(x):
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str)


def _filled(tree, seed=0):
    """Put arrays of random bits, among them special ones, in place of the shapes."""
    rng = np.random.default_rng(seed)

    def array(leaf):
        shape = leaf[1]
        if shape is None:
            return None
        bits = rng.integers(0, 2**32, size=shape, dtype=np.uint32)
        special = rng.choice(np.array(SPECIAL_BITS, np.uint32), size=shape)
        bits = np.where(rng.random(shape) < 0.5, bits, special)
        return np.asarray(bits, np.uint32).view(np.float32)

    return jax.tree.map(array, tree, is_leaf=_is_leaf)


def _bits(tree):
    flat, treedef = jax.tree.flatten(tree)
    return [np.asarray(x).view(np.uint32).tolist() for x in flat], treedef


def _assert_same_bits(got, wanted):
    assert _bits(got) == _bits(wanted)


def _padding(plan):
    """Return bool[n], True where no parameter lies."""
    free = np.ones(plan.n, bool)
    for slot in plan.slots:
        free[slot.offset : slot.offset + slot.size] = False
    return free


def _leaf(plan, params, path):
    found = {s.path: s.leaf for s in (*plan.slots, *plan.frozen)}
    return jax.tree.leaves(params)[found[path]]


def _drawn_rule(data, trainable=False):
    """Draw what a rule says about each path; keep all parameters if asked to."""
    said = {}

    def rule(path, leaf):
        if path not in said:
            said[path] = data.draw(params_of_roles)
        param = said[path]
        if trainable:
            param = rjax.Param(param.role, param.precision, param.decay)
        return param

    return rule


def _plan_or_none(params, config, rule=None):
    """Make a plan, `None` where the tree or the rule leaves nothing to train."""
    if not jax.tree.leaves(params):
        return None
    try:
        return rjax.make_plan(params, config, rule=rule)
    except ValueError as error:
        assert "no trainable parameter" in str(error)
        return None


@given(size=st.integers(0, 2**31))
def test_capacity_is_the_slot_law(size):
    capacity = capacity_of(size)
    assert 2 * capacity == math.ceil((2 * size + 16) / 256) * 256
    assert 4 * capacity == 2 * (2 * capacity)
    assert capacity % 128 == 0 and capacity - size >= 8


@pytest.mark.parametrize(
    ("size", "capacity"),
    [(0, 128), (1, 128), (120, 128), (121, 256), (128, 256), (248, 256), (249, 384)],
)
def test_capacities_by_hand(size, capacity):
    assert capacity_of(size) == capacity


@given(tree=trees)
def test_any_tree_packs_and_unpacks_bit_for_bit(tree):
    params = _filled(tree)
    plan = _plan_or_none(params, FP16)
    if plan is None:
        return
    arena = plan.pack(params)
    assert arena.shape == (plan.n,) and arena.dtype == jnp.float32
    _assert_same_bits(plan.unpack(arena), params)
    assert not np.asarray(arena).view(np.uint32)[_padding(plan)].any()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_packing_flushes_and_quietens_nothing(wrap):
    values = np.array(SPECIAL_BITS, np.uint32).view(np.float32)
    params = {"bias": jnp.asarray(values), "w": jnp.asarray(values)[:, None]}
    plan = rjax.make_plan(params, FP16)
    _assert_same_bits(wrap(lambda p: plan.unpack(plan.pack(p)))(params), params)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_parameters_widen_exactly(dtype):
    bits = jnp.arange(2**16, dtype=jnp.uint16)
    values = jax.lax.bitcast_convert_type(bits, dtype)
    params = {"w": values[~jnp.isnan(values)]}
    plan = rjax.make_plan(params, FP16)
    unpacked = plan.unpack(plan.pack(params))["w"]
    want = np.asarray(params["w"]).astype(np.float32)
    _assert_same_bits(unpacked, want)
    arena = plan.pack(params, dtype=dtype)
    assert arena.dtype == dtype
    np.testing.assert_array_equal(plan.unpack(arena)["w"], params["w"])


@given(tree=trees, data=st.data())
def test_slots_obey_the_law(tree, data):
    params = _filled(tree)
    plan = _plan_or_none(params, FP16, _drawn_rule(data))
    if plan is None:
        return
    end = 0
    for slot in plan.slots:
        assert slot.offset == end, "slots tile the arena in order"
        assert slot.size == math.prod(slot.shape)
        assert 2 * slot.capacity == math.ceil((2 * slot.size + 16) / 256) * 256
        end += slot.capacity
    assert end == plan.n
    assert plan.bias_like == sum(s.capacity for s in plan.slots if not s.half)
    parts = [ROLES.index(slot.part) for slot in plan.slots]
    assert parts == sorted(parts)
    assert all(slot.half != slot.part.bias_like for slot in plan.slots)
    everything = sorted(s.leaf for s in (*plan.slots, *plan.frozen))
    assert everything == list(range(len(jax.tree.leaves(params))))


@given(tree=trees, data=st.data())
def test_the_rule_is_kept(tree, data):
    params = _filled(tree)
    rule = _drawn_rule(data)
    plan = _plan_or_none(params, FP16, rule)
    if plan is None:
        return
    for slot in plan.slots:
        said = rule(slot.path, None)
        assert said.trainable is not False
        assert said.role in (None, slot.role)
        usual = slot.role not in BIAS_LIKE
        assert (
            slot.half == {None: usual, "half": True, "float32": False}[said.precision]
        )
        assert slot.decay == (usual if said.decay is None else said.decay)
    for leaf in plan.frozen:
        assert rule(leaf.path, None).trainable is False


@given(tree=trees, data=st.data())
def test_an_element_has_one_index_in_every_arena(tree, data):
    params = jax.tree.map(lambda x: np.asarray(x * 0 + 1.5, np.float32), _ones(tree))
    params = jax.tree.map(_numbered, params)
    plan = _plan_or_none(params, FP16, _drawn_rule(data, trainable=True))
    if plan is None:
        return
    master = plan.pack(params)
    compute = half_copy(plan, master)
    assert compute is not None
    assert compute.shape == (plan.n - plan.bias_like,)
    seen = views(plan, master, compute)
    for slot, view in zip(plan.slots, seen, strict=True):
        value = _leaf(plan, params, slot.path)
        place = slice(slot.offset, slot.offset + slot.size)
        np.testing.assert_array_equal(master[place], value.reshape(-1))
        assert view.shape == slot.shape
        assert view.dtype == (jnp.float16 if slot.half else jnp.float32)
        np.testing.assert_array_equal(np.asarray(view), value.astype(view.dtype))
        if slot.half:
            start = slot.offset - plan.bias_like
            half = compute[start : start + slot.size]
            np.testing.assert_array_equal(half, value.reshape(-1).astype(np.float16))


def _ones(tree):
    return jax.tree.map(
        lambda leaf: None if leaf[1] is None else np.ones(leaf[1], np.float32),
        tree,
        is_leaf=_is_leaf,
    )


def _numbered(x):
    return (np.arange(x.size) % 1000 + 0.25 * x.ndim).reshape(x.shape).astype("f4")


@given(tree=trees, data=st.data())
def test_bounds_agree_with_the_slots(tree, data):
    params = _filled(tree)
    plan = _plan_or_none(params, FP16, _drawn_rule(data))
    if plan is None:
        return
    for role in ROLES:
        inside = [slot for slot in plan.slots if slot.part is role]
        start, stop = plan.bounds(Region[f"W_{role.name}"])
        assert stop - start == sum(slot.capacity for slot in inside)
        assert plan.bounds(Region[f"G_{role.name}"]) == (start, stop)
        if not inside:
            continue
        assert start == inside[0].offset
        if role in HALF_ROLES:
            b = plan.bias_like
            assert plan.bounds(Region[f"A_{role.name}"]) == (start - b, stop - b)


def _shaped(*shapes_by_path):
    tree = {}
    for path, shape in shapes_by_path:
        *modules, name = path.split("/")
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


def test_slots_lie_role_by_role_in_natural_path_order():
    tree = _shaped(
        *((f"block{i}/conv/kernel", (3, 3, 8, 8)) for i in (10, 2, 1, 100)),
        *((f"block{i}/bn/scale", (8,)) for i in (10, 2)),
        *((f"block{i}/bn/bias", (8,)) for i in (10, 2)),
        ("head/kernel", (8, 2)),
        ("head/bias", (2,)),
        ("stem/kernel", (3, 3, 3, 8)),
    )
    plan = rjax.make_plan(tree, FP16)
    assert [(s.path, s.role) for s in plan.slots] == [
        ("block2/bn/bias", Role.BN_BIAS),
        ("block10/bn/bias", Role.BN_BIAS),
        ("block2/bn/scale", Role.BN_WEIGHT),
        ("block10/bn/scale", Role.BN_WEIGHT),
        ("head/bias", Role.FC_BIAS),
        ("head/kernel", Role.FC_WEIGHT),
        ("stem/kernel", Role.FIRST_CONV),
        ("block1/conv/kernel", Role.DEEP_CONV),
        ("block2/conv/kernel", Role.DEEP_CONV),
        ("block10/conv/kernel", Role.DEEP_CONV),
        ("block100/conv/kernel", Role.DEEP_CONV),
    ]


def test_natural_order_holds_for_lists_of_layers():
    tree = [{"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)} for _ in range(12)]
    plan = rjax.make_plan(tree, FP16)
    assert [slot.path for slot in plan.slots] == [f"{i}/w" for i in range(12)]


def test_order_does_not_depend_on_the_order_of_the_tree():
    tree = _shaped(("b", (2, 2)), ("a", (2, 2)), ("c/bias", (2,)))
    other = dict(reversed(tree.items()))
    assert rjax.make_plan(tree, FP16) == rjax.make_plan(other, FP16)


def test_precision_moves_a_parameter_over_the_border():
    tree = _shaped(
        ("embed/table", (5, 4)), ("head/kernel", (4, 2)), ("head/bias", (2,))
    )
    rules = {
        "embed/table": rjax.Param(precision="float32"),
        "head/bias": rjax.Param(precision="half"),
    }
    plan = rjax.make_plan(tree, FP16, rule=lambda path, leaf: rules.get(path))
    assert [(s.path, s.role, s.part, s.half, s.decay) for s in plan.slots] == [
        ("embed/table", Role.FC_WEIGHT, Role.FC_BIAS, False, True),
        ("head/bias", Role.FC_BIAS, Role.FC_WEIGHT, True, False),
        ("head/kernel", Role.FC_WEIGHT, Role.FC_WEIGHT, True, True),
    ]
    assert plan.bias_like == 128


def test_frozen_parameters_lie_outside_the_arenas():
    tree = _shaped(("a/kernel", (4, 2)), ("a/bias", (2,)), ("b/kernel", (4, 2)))
    plan = rjax.make_plan(
        tree,
        FP16,
        rule=lambda path, leaf: rjax.Param(trainable=path[0] != "a"),
    )
    assert [slot.path for slot in plan.slots] == ["b/kernel"]
    assert [(leaf.path, leaf.dtype) for leaf in plan.frozen] == [
        ("a/bias", "float32"),
        ("a/kernel", "float16"),
    ]
    assert plan.unpack(jnp.zeros(plan.n))["a"] == {"bias": None, "kernel": None}


def test_structs_make_the_plan_that_arrays_make():
    params = {"w": np.ones((3, 2), np.float16), "bias": np.ones(2, np.float32)}
    structs = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params))
    assert rjax.make_plan(structs, FP16) == rjax.make_plan(params, FP16)


@pytest.mark.parametrize(
    "shapes",
    [[(2**31,)], [(2**16, 2**16)], [(2**30,), (2**30,)], [(2**31 - 8,)]],
)
def test_arenas_beyond_int32_are_refused(shapes):
    tree = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with pytest.raises(ValueError, match=r"more than 2\^31 - 1") as caught:
        rjax.make_plan(tree, FP16)
    assert "\n" not in str(caught.value)


def test_the_largest_arena_is_accepted():
    largest = 2**31 - 128 - 8
    tree = {"w": jax.ShapeDtypeStruct((largest,), jnp.float32)}
    assert rjax.make_plan(tree, FP16).n == 2**31 - 128


def test_frozen_parameters_do_not_count_towards_the_limit():
    tree = {
        "big": jax.ShapeDtypeStruct((2**31,), jnp.float32),
        "w": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    plan = rjax.make_plan(
        tree, FP16, rule=lambda path, leaf: rjax.Param(trainable=path == "w")
    )
    assert plan.n == 128


def test_two_leaves_of_one_path_are_refused():
    params = {"a/b": jnp.zeros(2), "a": {"b": jnp.ones(2)}}
    with pytest.raises(ValueError, match="`params` has two leaves.*'a/b'"):
        rjax.make_plan(params, FP16)
    with pytest.raises(ValueError, match="`batch_stats` has two leaves.*'a/b'"):
        rjax.make_plan({"w": jnp.zeros(2)}, FP16, batch_stats=params)
