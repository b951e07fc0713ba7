"""A run of several processes, and of several devices, is the run of one."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import virtual_devices
from processes import free_port
from tiny_run import Place

from zest_jax.errors import EXIT_LOST

# One short iteration: every kind of step and both roles are in it.
SHORT = ("--config.schedule.iterations=1", "--config.schedule.solver_steps=2")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("processes"))
    place.make_world()
    return place


def run_together(
    place: Place,
    workdir: Path,
    *more: str,
    processes: int = 1,
    devices: int = 1,
    bucket: bool = False,
):
    """Starts the processes of a run, waits for their ends, and gives their output; in a `bucket`
    for which the workdir stands."""
    port = free_port()

    def one(number: int):
        variables = {"XLA_FLAGS": virtual_devices.flags(devices)}
        if processes > 1:
            variables |= {
                "ZEST_COORDINATOR": f"127.0.0.1:{port}",
                "ZEST_PROCESSES": str(processes),
                "ZEST_PROCESS": str(number),
            }
        if bucket:
            arguments = place.arguments(f"gs://{workdir.name}", *SHORT, *more)
            arguments = [str(workdir.parent), "train", *arguments]
            return place.run(arguments, "tests.in_a_bucket", variables=variables)
        arguments = place.arguments(workdir, *SHORT, *more)
        return place.run(arguments, variables=variables)

    with ThreadPoolExecutor(processes) as pool:
        done = list(pool.map(one, range(processes)))
    for each in done:
        assert each.returncode == 0, each.stderr[-3000:]
    return done


def records(workdir: Path) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def assert_alike(workdir: Path, other: Path) -> None:
    """The same steps with the same numbers, but for times and for how busy slots were."""
    one, two = records(workdir), records(other)
    assert [(r["step"], r["phase"]) for r in one] == [(r["step"], r["phase"]) for r in two]
    compared = 0
    for a, b in zip(one, two, strict=True):
        for name in a.keys() & b.keys() - {"phase"}:
            busy = "slot" in name or name.endswith(("/decode_steps", "/prefilled"))
            if busy or name.startswith("time") or a[name] is None:
                continue
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-4), (a["step"], name)
            compared += 1
    assert compared > 100


@pytest.fixture(scope="module")
def alone(place):
    workdir = place.folder / "alone"
    run_together(place, workdir)
    return workdir


def test_two_processes_have_the_curve_of_one(place, alone):
    """Their workdir in a bucket, and moments that wait in pinned memory, change nothing."""
    workdir = place.folder / "two"
    idle = "--config.training.offload_idle=True"
    first, second = run_together(place, workdir, idle, processes=2, bucket=True)
    assert_alike(alone, workdir)
    # One of them speaks, and writes the report.
    assert "held-out EM" in first.stderr and "held-out EM" not in second.stderr
    assert json.loads((workdir / "report.json").read_text("utf-8"))["retraces"] == 0
    assert (workdir / "checkpoints").is_dir() and not (workdir / ".lock").exists()
    slowest = [r["time/slowest_over_median"] for r in records(workdir) if "solver/em" in r]
    assert slowest and min(slowest) >= 1.0


@pytest.mark.slow
def test_four_processes_go_on_from_what_two_devices_of_one_began(place, alone):
    """Checkpoints are restored under other meshes and numbers of processes: 1 x 2 devices with
    tensor parallelism, then 4 x 1 with shared weights, then one device."""
    workdir = place.folder / "changing"
    stop = ["--config.schedule.iterations=1"]
    begun = place.start(
        place.arguments(workdir, *SHORT, *stop, "--config.mesh.tensor=2"),
        variables={"XLA_FLAGS": virtual_devices.flags(2)},
    )
    wait_for_step(workdir, begun, 5)  # of 6, so that four processes compile the solver's part alone
    begun.kill()
    begun.communicate()
    step = records(workdir)[-1]["step"]
    done = run_together(place, workdir, "--config.mesh.fsdp=4", processes=4)
    assert "resumed at step" in done[0].stderr and step >= 5
    assert_alike(alone, workdir)


def wait_for_step(workdir: Path, process, step: int) -> None:
    """Returns when a running process has written a checkpoint's step."""
    import time

    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        path = workdir / "metrics.jsonl"
        if path.exists() and any(r["step"] >= step for r in whole_records(path)):
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate()[1][-2000:])


def whole_records(path: Path) -> list[dict]:
    text = path.read_text("utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def test_what_the_variables_must_say(place):
    for variables, said in (
        ({"ZEST_PROCESSES": "2"}, "ZEST_COORDINATOR and ZEST_PROCESS"),
        (
            {"ZEST_COORDINATOR": "127.0.0.1:1", "ZEST_PROCESSES": "2", "ZEST_PROCESS": "2"},
            "from 0 to one less",
        ),
        ({"ZEST_DISTRIBUTED": "yes"}, "it is auto or not set"),
    ):
        done = place.run(place.arguments(place.folder / "none"), variables=variables)
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_ends_the_other_with_a_sentence(place, killed):
    workdir = place.folder / f"killed{killed}"
    variables = {
        "XLA_FLAGS": virtual_devices.flags(1),
        "ZEST_COORDINATOR": f"127.0.0.1:{free_port()}",
        "ZEST_PROCESSES": "2",
    }
    both = [
        place.start(
            place.arguments(workdir, *SHORT), variables=variables | {"ZEST_PROCESS": str(number)}
        )
        for number in (0, 1)
    ]
    wait_for_step(workdir, both[0], 1)
    both[killed].kill()
    other = both[1 - killed]
    _, said = other.communicate(timeout=60)
    both[killed].communicate()
    assert other.returncode == EXIT_LOST, said[-2000:]
    assert "another process of this run is gone" in said
