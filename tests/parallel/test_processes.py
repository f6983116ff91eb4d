"""Two processes of two devices each are as one of four."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import BOTH, config
from parallel.rigs import ONE, assert_near, pull, rows, weights

TESTS = Path(__file__).parents[1]
# Two devices, and programs that are compiled in half the time.
FLAGS = (
    "--xla_force_host_platform_device_count=2",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
SCRIPT = """
import json, sys
import jax
address, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, process)
from helpers import BOTH, config, digest
from parallel.rigs import ONE, Over, pull, rows, weights
from rjax.parallel import gather
assert jax.device_count() == 4 and jax.local_device_count() == 2
mine = slice(2 * process, 2 * process + 2)
rigs = [pull(Over(4, sharded), config(), BOTH) for sharded in (False, True)]
for rig, other in zip(rigs, rigs[::-1]):
    batch = {path: x[mine] for path, x in rows(0, BOTH, n=4).items()}
    state, report = rig.jitted(rig.state(), rig.step.shard_batch(batch))
    one = gather(rig.plan, state)
    moved = gather(rig.plan, other.step.place(state))
    said = report.as_dict()
    print(json.dumps({
        "loss": said["loss"], "norm": said["grad_norm"], "state": digest(one),
        "moved": digest(moved), "weights": weights(rig, one).tolist(),
    }))
"""


@pytest.mark.slow
def test_two_processes_train_as_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(FLAGS),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, address, str(i)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, said, strict=True):
        assert process.returncode == 0, errors[-4000:]
    first, second = (
        [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        for output, _ in said
    )
    assert first == second and len(first) == 2
    rig = pull(ONE, config(), BOTH)
    state, [report] = rig.run(rows(0, BOTH, n=4))
    for found in first:
        assert found["moved"] == found["state"]
        assert_near(found["loss"], report.loss, 16)
        assert_near(found["norm"], report.grad_norm, 2.0**13)
        assert_near(found["weights"], weights(rig, state), 2.0**13)
