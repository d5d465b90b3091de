"""Freezing jobs on a real GPU, as root, with CRIU: `python -m benchmarks.gpu_freeze [PART …]`.

Not part of CI: it needs an NVIDIA GPU with driver 570 or newer, PyTorch and about 40 GiB of memory.

    rounds   a training loop, frozen for good and restored twenty times, ends with the loss of an uninterrupted run
    memory   8 GiB on the device: phases and pause of leave-running, a second checkpoint, hibernate and wake, all beside
             the driver's own calls and a bare dump to tmpfs
    shared   two processes on one GPU, frozen as one job
    killed   the tool killed at each stage; the next call frees the job
    container  1 GiB on the device of a container below runc: kept while it runs, frozen and restored by hand, then
             stopped and created anew by kedge-runc; its program compares host, device and file at each step
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

TRAIN = """
import sys, time, torch
torch.manual_seed(0); torch.use_deterministic_algorithms(True)
steps, path = int(sys.argv[1]), sys.argv[2]
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1)).cuda()
optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(steps):
    x = torch.randn(256, 256, device="cuda")
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimiser.zero_grad(); loss.backward(); optimiser.step()
    if step % 10 == 0:
        torch.cuda.synchronize()
        open(path, "w").write(str(step))
        time.sleep(0.01)
open(path + ".loss", "w").write(loss.item().hex())
"""

HOLD = """
import sys, time, torch
torch.manual_seed(0)
held = [torch.randn(1 << 28, device="cuda") for _ in range(int(sys.argv[1]))]  # 1 GiB each
total = sum(part.double().sum().item() for part in held)
path, n = sys.argv[2], 0
if len(sys.argv) > 3:
    import os
    if os.fork() == 0:
        code = open("/proc/self/cmdline").read().split(chr(0))[2]
        os.execv(sys.executable, [sys.executable, "-c", code, "1", path + "-child"])
while True:
    assert sum(part.double().sum().item() for part in held) == total
    n += 1
    open(path, "w").write(str(n))
    time.sleep(0.05)
"""


# Without PyTorch: a container brings its own libraries, this one has those of the system.
COUNT = """
import ctypes, os, time
cuda, size = ctypes.CDLL("libcuda.so.1"), 1 << 30
def call(name, *arguments):
    if error := getattr(cuda, name)(*arguments):
        open("/work/broken", "a").write(f"{name}: {error}")
        os._exit(1)
context, there = ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(there), ctypes.c_size_t(size))
call("cuMemsetD32_v2", there, 0, ctypes.c_size_t(size // 4))
n, cell = 0, ctypes.c_uint64()
log = os.open("/work/log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
while True:
    for at in (0, size - 8):
        call("cuMemcpyDtoH_v2", ctypes.byref(cell), ctypes.c_uint64(there.value + at), ctypes.c_size_t(8))
        if cell.value != n or os.fstat(log).st_size != 8 * n:
            open("/work/broken", "a").write(f"step {n}: {cell.value} on the device, {os.fstat(log).st_size} bytes")
            os._exit(1)
    n += 1
    cell.value = n
    for at in (0, size - 8):
        call("cuMemcpyHtoD_v2", ctypes.c_uint64(there.value + at), ctypes.byref(cell), ctypes.c_size_t(8))
    os.write(log, b"%7d\\n" % n)
    time.sleep(0.01)
"""


class Job:
    def __init__(self, folder: Path, code: str, *arguments: str) -> None:
        self.folder = folder
        self.path = folder / "steps"
        quiet = ["sh", "-c", 'exec "$@" </dev/null >/dev/null 2>"$0"', str(folder / "errors")]
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        command = [*quiet, sys.executable, "-c", code, arguments[0], str(self.path), *arguments[1:]]
        self.process = subprocess.Popen(command, start_new_session=True, close_fds=True)
        self.wait()

    def wait(self, beyond: str | None = None) -> None:
        until = time.monotonic() + 120
        while not self.path.exists() or self.path.read_text() in ("", beyond):
            assert time.monotonic() < until, (self.folder / "errors").read_text()[-2000:]
            time.sleep(0.01)

    def goes_on(self) -> None:
        self.wait(self.path.read_text())


def kedge(*arguments: str, check: bool = True) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "process", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    assert not check or done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else {"status": done.returncode, "said": done.stderr}


def rounds(folder: Path) -> dict[str, Any]:
    steps = "6000"
    whole = Job(folder / "whole", TRAIN, steps)
    whole.process.wait(300)
    loss = (folder / "whole" / "steps.loss").read_text()
    (folder / "cut").mkdir()
    job = Job(folder / "cut", TRAIN, steps)
    job.goes_on()
    kedge("checkpoint", str(job.process.pid), "--key", "train")
    job.process.wait(60)
    count = 1
    while not (folder / "cut" / "steps.loss").exists() and count < 20:
        running = subprocess.Popen(
            [sys.executable, "-m", "kedge", "process", "run", "--key", "train"], stderr=subprocess.PIPE, text=True
        )
        job.goes_on()
        running.send_signal(signal.SIGTERM)
        errors = running.communicate(timeout=120)[1]
        assert running.returncode == 75, errors
        count += 1
    last = subprocess.run(
        [sys.executable, "-m", "kedge", "process", "run", "--key", "train"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert last.returncode == 0, last.stderr
    return {
        "rounds": count,
        "same loss": (folder / "cut" / "steps.loss").read_text() == loss,
        "loss": float.fromhex(loss),
    }


def memory(folder: Path) -> dict[str, Any]:
    from kedge.containers.gpu import cuda

    job = Job(folder, HOLD, "8")
    pid = job.process.pid
    driver = cuda.driver()
    bare: dict[str, float] = {}

    def timed(name: str, work: Any) -> None:
        started = time.monotonic()
        work()
        bare[name] = round(time.monotonic() - started, 3)

    images = Path(tempfile.mkdtemp(dir="/dev/shm"))
    timed("lock", lambda: driver.lock(pid))
    timed("to host", lambda: driver.to_host(pid))
    dump = ["criu", "dump", "--tree", str(pid), "--images-dir", str(images), "--leave-running", "--link-remap", "-v1"]
    timed("dump", lambda: subprocess.run(dump, check=True))
    timed("back", lambda: driver.back(pid, {}))
    timed("unlock", lambda: driver.unlock(pid))
    size = sum(file.stat().st_size for file in images.iterdir())
    shutil.rmtree(images)
    job.goes_on()
    found: dict[str, Any] = {"bare": bare, "images GiB": round(size / (1 << 30), 2)}
    for name in ("first", "second"):
        told = kedge("checkpoint", str(pid), "--key", "held", "--leave-running")
        kept = told["checkpoint"]
        found[name] = {
            "phases_ms": told["phases_ms"],
            "pause_ms": told["paused_ms"],
            "stored": kept["stored_bytes"],
            "size": kept["size_bytes"],
        }
        job.goes_on()
    found["pause : bare"] = round(found["first"]["pause_ms"] / 1000 / sum(bare.values()), 2)
    found["second stores"] = f"{found['second']['stored'] / found['second']['size']:.2%}"
    found["hibernate"] = kedge("hibernate", str(pid))["seconds"]
    found["wake"] = kedge("wake", str(pid))["seconds"]
    found["wake : bare"] = round(found["wake"] / (bare["back"] + bare["unlock"]), 2)
    job.goes_on()
    os.killpg(pid, signal.SIGKILL)
    return found


def shared(folder: Path) -> dict[str, Any]:
    job = Job(folder, HOLD, "1", "two")
    child = folder / "steps-child"
    until = time.monotonic() + 120
    while not child.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    told = kedge("checkpoint", str(job.process.pid), "--key", "two")
    job.process.wait(60)
    before = job.path.read_text(), child.read_text()
    running = subprocess.Popen(
        [sys.executable, "-m", "kedge", "process", "run", "--key", "two"], stderr=subprocess.PIPE, text=True
    )
    job.wait(before[0])
    while child.read_text() in ("", before[1]):
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=120)
    return {
        "processes": told["checkpoint"]["metadata"]["gpu"]["processes"],
        "went on": True,
        "stopped": running.returncode,
    }


def killed(folder: Path) -> dict[str, Any]:
    job = Job(folder, HOLD, "4")
    pid = str(job.process.pid)
    outcomes = []
    for delay in (0.1, 0.4, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0):
        tool = subprocess.Popen(
            [sys.executable, "-m", "kedge", "process", "checkpoint", pid, "--key", "k", "--leave-running"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        time.sleep(delay)
        os.killpg(tool.pid, signal.SIGKILL)
        tool.wait()
        from kedge.containers.gpu import cuda
        from kedge.containers.gpu import memory as gpu

        before = cuda.driver().state(int(pid))
        gpu.free_forgotten()
        job.goes_on()
        outcomes.append((delay, before.name if before is not None else None))
    os.killpg(int(pid), signal.SIGKILL)
    return {"state after the kill, then freed": outcomes}


def container(folder: Path) -> dict[str, Any]:
    from kedge.containers.runtime import calls as runtime
    from tests.lab import PYTHON, Lab, lab, wait_for

    def steps(bundle: Path) -> int:
        work = bundle / "upper/work"
        assert not (work / "broken").exists(), (work / "broken").read_text()
        return (work / "log").stat().st_size // 8 if (work / "log").exists() else 0

    def goes_on(bundle: Path) -> int:
        before = steps(bundle)
        return wait_for(lambda: n if (n := steps(bundle)) > before else None, f"it stands still at {before}", 60)

    def bundle_of(made: Lab, name: str, *environment: str) -> Path:
        bundle = made.bundle(name, PYTHON, "-c", COUNT, network=None)
        spec = json.loads((bundle / "config.json").read_text())
        devices = [path for path in sorted(Path("/dev").glob("nvidia*")) if path.is_char_device()]
        numbers = [(path, os.stat(path).st_rdev) for path in devices]
        spec["linux"]["devices"] = [
            {"path": str(path), "type": "c", "major": os.major(n), "minor": os.minor(n), "fileMode": 0o666}
            for path, n in numbers
        ]
        spec["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
        # What is mounted below /usr comes by itself: CRIU must be told of every mount that is not the container's own.
        spec["mounts"][-1]["options"] = ["bind", "ro"]
        below = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        spec["mounts"] += [
            {"destination": path, "type": "bind", "source": path, "options": ["bind", "ro"]}
            for path in below
            if path.startswith("/usr/")
        ]
        spec["process"]["env"] += environment
        (bundle / "config.json").write_text(json.dumps(spec))
        return bundle

    found: dict[str, Any] = {}
    with lab(folder) as made:
        bundle = bundle_of(made, "one")
        made.start("one")
        goes_on(bundle)
        root = made.runtime_root
        freeze = ("container", "checkpoint", "one", "--root", root, "--key", "k", "--gpu", "require")
        told = made.answer(*freeze, "--leave-running")
        found["kept while it runs, stood still for s"] = round(told["paused_ms"] / 1000, 2)
        goes_on(bundle)
        made.answer(*freeze)
        before = steps(bundle)
        assert not made.is_running("one")
        started = time.monotonic()
        made.kedge("container", "restore", "k")
        found["restored after s"] = round(time.monotonic() - started, 2)
        found["went on at, to"] = before, goes_on(bundle)
        made.remove("one")

        bundle = bundle_of(made, "two", "KEDGE_CHECKPOINT=1", "KEDGE_WORKLOAD=two", "KEDGE_POLICY=fail")
        front = Path(runtime.__file__).with_name("kedge-runc")
        environment = made.environment(KEDGE_PYTHON=sys.executable, KEDGE_RUNC_STATE=str(made.root / "marks"))

        log = os.open(made.root / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def call(*words: str | Path) -> None:
            said = subprocess.DEVNULL if words[0] == "create" else log  # the container's streams are those of create
            streams = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
            command = made.enter([front, "--root", root, "--log", made.root / "runc.log", *words])
            done = subprocess.run(command, env=environment, check=False, timeout=300, **streams)
            assert done.returncode == 0, (made.root / "said").read_text() + (made.root / "runc.log").read_text()

        reached = []
        for _ in range(3):
            call("create", "--bundle", bundle, "two")
            call("start", "two")
            reached.append(goes_on(bundle))
            call("kill", "two", "TERM")
            wait_for(lambda: None if made.is_running("two") else True, (made.root / "said").read_text(), 20)
            call("delete", "--force", "two")
        found["by kedge-runc, steps reached in three lives"] = reached
        assert reached == sorted(set(reached)), reached
    return found


def main() -> None:
    chosen = sys.argv[1:] or ["rounds", "memory", "shared", "killed", "container"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        os.environ["KEDGE_STATE_DIR"] = f"{temporary}/state"
        os.environ["KEDGE_STORE"] = f"{tempfile.mkdtemp()}/store"
        for name in chosen:
            folder = Path(temporary) / name
            (folder / "whole").mkdir(parents=True)
            started = time.monotonic()
            try:
                found: object = globals()[name](folder)
            except Exception:  # noqa: BLE001 - the others are run all the same
                found = traceback.format_exc()[-1500:]
            print(json.dumps({name: found, "seconds": round(time.monotonic() - started, 1)}), flush=True)


if __name__ == "__main__":
    main()
