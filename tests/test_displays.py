"""States and reports show themselves alike, whatever has become of their arrays."""

import re

import jax
import jax.numpy as jnp
import pytest

import rjax
from rjax import displays
from rjax.programs.epoch_report import summarize

PARAMS = {"w": jnp.ones((4, 2))}
PLAN = rjax.make_plan(PARAMS, rjax.Config(ema=rjax.Ema(0.5)))
LOSS = rjax.stateless_loss(lambda p, x: jnp.float32(x @ p["w"]).mean())
STEP = rjax.make_train_step(LOSS, PLAN)
X = jnp.ones((3, 4), jnp.float16)


@pytest.fixture(scope="module")
def after():
    with jax.numpy_dtype_promotion("strict"):
        return jax.jit(STEP)(rjax.init_state(PLAN, PARAMS), X)


def test_a_report_is_one_line_of_values(after):
    _, report = after
    shown = repr(report)
    assert shown.startswith("Report(loss=4, applied=True, scale=8192, grad_norm=")
    assert "bad_slots=bool[1]" in shown and "digests" not in shown


def test_a_state_tells_counters_and_arenas(after):
    state, _ = after
    shown = repr(state)
    assert shown.startswith("RegionState(master=float32[128], compute=float16[128], ")
    assert "applied_steps=1, skipped=0" in shown and "key=random key" in shown
    assert "opt_state" not in shown and "results=2 arrays" in shown


def test_in_a_notebook_they_look_like_a_plan(after):
    for shown, title in zip((*after, PLAN), ("state", "report", "plan"), strict=True):
        page = shown._repr_html_()
        assert page.startswith(f"<div><p><b>rjax {title}</b>: ")
        assert re.search(r"<details><summary>\d+ (fields|regions)</summary>", page)
        assert not re.search(r"color|background:|<script", page.partition("<svg")[0])
    assert "step 1, applied 1, skipped 0, scale 8192, 2.0 KiB" in after[0]._repr_html_()
    assert "loss 4, applied True, scale 8192, step 0" in after[1]._repr_html_()


def test_what_is_traced_planned_or_given_away_is_told_by_its_shape():
    seen = []

    def traced(state, x):
        seen.append((repr(state), state._repr_html_()))
        state, report = STEP(state, x)
        seen.append((repr(report), report._repr_html_()))
        return state, report

    state = rjax.init_state(PLAN, PARAMS)
    planned = jax.eval_shape(traced, state, X)
    seen += [(repr(part), part._repr_html_()) for part in planned]
    for shown, page in seen:
        assert "scale=float32[]" in shown and "float32[]" in page
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    assert "master=float32[128], given away" in repr(state)
    assert "scale=given away" in repr(state) and "given away" in state._repr_html_()


def test_reports_of_a_scan_are_told_by_their_shape():
    state = rjax.init_state(PLAN, PARAMS)
    _, reports = jax.lax.scan(STEP, state, jnp.stack([X] * 3))
    assert repr(reports).startswith("Report(loss=float32[3], applied=bool[3]")


def test_an_epoch_is_told_as_one(after):
    _, report = after
    epoch = summarize(jax.tree.map(lambda x: x[None], report))
    assert repr(epoch).startswith("EpochReport(loss=4, applied=True")
    page = epoch._repr_html_()
    assert page.startswith("<div><p><b>rjax epoch report</b>: loss 4, applied True")
    assert "skips 0" in page.partition("</p>")[0]


def test_names_are_escaped():
    page = displays.page("report", "<b>", [("<i>", "&")])
    assert "&lt;b&gt;" in page and "&lt;i&gt;" in page and "&amp;" in page
