"""`assay-kernels serve`: from a checkpoint to an endpoint that has been found sound."""

import fcntl
import json
import os
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import yaml

from assay_kernels import __version__
from assay_kernels import settings as plugin_settings
from assay_kernels.launcher import (
    arguments,
    client,
    host,
    logfile,
    preflight,
    processes,
    procfs,
    ready,
    shm,
    watchdog,
)
from assay_kernels.settings import (
    arithmetic,
    cpu_operators,
    kernels,
    on_mismatch,
    selfcheck_timeout,
)
from assay_kernels.vllm_plugin import door, proof

BEHIND_THE_DOOR = "/v1/models"
STOP_MARGIN_SECONDS = 20.0
"""Beyond vLLM's own shutdown-timeout: time to end processes after the last request."""
UNOPENED_STOP_SECONDS = 3.0
"""How long vLLM may take to end while no client has been let in."""
RANK_SECONDS = 60.0
"""How long a worker without the plugin may take to say its rank before it is named without one."""

DEFAULT_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
FORCED_ENVIRONMENT = {
    # The processes are told apart by their titles.
    "VLLM_PROCESS_NAME_PREFIX": "VLLM",
    # That front end runs no ASGI middleware, so no door.
    "VLLM_USE_RUST_FRONTEND": "0",
}
LOCAL_MODEL_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class LaunchError(Exception):
    """Ends the launcher with one message and an exit code: 2 nothing was started, 1 it failed."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class StopRequested(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP: a wish, not an error."""


@dataclass(frozen=True)
class Settings:
    model: str
    """Folder of a checkpoint, or a name that vLLM resolves."""
    profile: Path
    """vLLM config file; variables for it stand beside it in a file of the same name with .env."""
    host: str = "127.0.0.1"
    port: int = 8000
    extra: tuple[str, ...] = ()
    """Further arguments for `vllm serve`."""
    state: Path = Path(".assay")
    require: bool = True
    """Open the door only if every vLLM process has proven the plugin (ASSAY_REQUIRE)."""
    start_seconds: float = 1800.0
    echo: logfile.Echo | None = None
    """Also write vLLM's log to standard output, in this form; the file is then kept small."""
    vllm: tuple[str, ...] = field(
        default=(sys.executable, "-m", "assay_kernels.launcher.vllm_main", "serve")
    )

    @property
    def log(self) -> Path:
        return self.state / "serve.log"

    @property
    def run_dir(self) -> Path:
        return self.state.absolute() / "run"

    @property
    def key_file(self) -> Path:
        """The door's bypass key, for who may read this folder: a canary beside the server."""
        return self.state.absolute() / "bypass.key"


def check(settings: Settings) -> None:
    """Refuse what cannot work before anything is started."""
    if (obstacle := host.Cpu.here().obstacle()) is not None:
        raise LaunchError(obstacle, 2)
    if not settings.profile.is_file():
        raise LaunchError(f"there is no profile {settings.profile}", 2)
    if (obstacle := arguments.obstacle(settings.extra, read_profile(settings.profile))) is not None:
        raise LaunchError(obstacle, 2)
    folder = Path(settings.model)
    looks_local = folder.exists() or settings.model.startswith((".", "/", "models/"))
    if looks_local and not (folder / "config.json").is_file():
        raise LaunchError(f"{settings.model} holds no checkpoint (no config.json)", 2)
    if looks_local and not (folder / "tokenizer.json").is_file():
        raise LaunchError(f"{settings.model} has no tokenizer (no tokenizer.json)", 2)
    allowed = os.environ.get("VLLM_PLUGINS")
    if settings.require and allowed is not None and "assay" not in allowed.split(","):
        raise LaunchError(
            f"VLLM_PLUGINS={allowed} does not name assay, so vLLM would not load it", 2
        )
    if (obstacle := ready.obstacle(variables(settings))) is not None:
        raise LaunchError(obstacle, 2)
    if keys := keys_file(settings):
        try:
            if not door.read_keys(Path(keys)):
                raise LaunchError(f"ASSAY_API_KEYS_FILE {keys} holds no key", 2)
        except door.KeysError as error:
            raise LaunchError(f"ASSAY_API_KEYS_FILE {error}", 2) from error
    if not 0 < settings.port < 65536:
        raise LaunchError(f"--port {settings.port}: must be between 1 and 65535", 2)
    if (obstacle := host.port_obstacle(settings.host, settings.port)) is not None:
        raise LaunchError(obstacle, 2)
    try:
        stalled_after(settings)
        arithmetic(variables(settings))
        cpu_operators(variables(settings))
        kernels(variables(settings))
        on_mismatch(variables(settings))
        selfcheck_timeout(variables(settings))
    except ValueError as error:
        raise LaunchError(str(error), 2) from error
    wish = wished(settings)
    machine = preflight.Machine.here(cache_folder(settings), wish.place == "gpu")
    obstacles = preflight.obstacles(wish, machine)
    if not obstacles and settings.require and model_type(folder) == "deepseek_v4":
        check_headers(folder)
        obstacles = preflight.model_obstacles(wish, machine, folder)
    if obstacles:
        raise LaunchError("\n".join(obstacles), 2)
    for warning in preflight.warnings(wish, machine):
        print(f"warning: {warning}", flush=True)


def wished(settings: Settings) -> preflight.Wish:
    """What the profile and its variables ask of the machine."""
    profile, given = read_profile(settings.profile), variables(settings)
    arch = given.get("ASSAY_ARCH", "cpu")
    if arch not in ("cpu", *preflight.CAPABILITIES):
        known = ", ".join(("cpu", *preflight.CAPABILITIES))
        raise LaunchError(f"ASSAY_ARCH={arch!r}: must be one of {known}", 2)
    ranks = arguments.ranks(settings.extra, profile)
    everywhere = arguments.all_ranks(settings.extra, profile)
    variant = given.get("ASSAY_CUDA_VARIANT", "")
    return preflight.Wish(settings.profile.stem, arch, ranks, profile, variant, everywhere)


def cache_folder(settings: Settings) -> Path:
    """Where everything that is compiled while serving is kept."""
    return plugin_settings.cache_folder(variables(settings))


def stalled_after(settings: Settings) -> float:
    """Seconds without progress after which the server is ended; 0: never. Raises ValueError."""
    text = variables(settings).get("ASSAY_STALLED_AFTER", "") or str(watchdog.DEFAULT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"ASSAY_STALLED_AFTER={text!r}: must be a number of seconds, 0 for never")
    return seconds


def model_type(folder: Path) -> object:
    """As config.json says it; None where there is none to read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def check_headers(folder: Path) -> None:
    """Read the checkpoint's headers as every vLLM process will: a second here, not a minute there.

    `assay-kernels audit` finds more; this is what the plugin would refuse to load.
    """
    from assay_kernels.checkpoint import CheckpointError, open_checkpoint

    try:
        open_checkpoint(folder)
    except CheckpointError as error:
        raise LaunchError(str(error), 2) from error


def is_quantised(model: str) -> bool:
    """Whether the checkpoint says that it is; a model that is not a local folder counts as such."""
    folder = Path(model)
    if not folder.is_dir():
        return True
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise LaunchError(f"{folder / 'config.json'} is not JSON: {error}", 2) from error
    return "quantization_config" in config or (folder / "hf_quant_config.json").is_file()


def variables(settings: Settings) -> dict[str, str]:
    """The caller's environment over the profile's variables."""
    path = settings.profile.with_suffix(".env")
    return (read_env_file(path) if path.is_file() else {}) | dict(os.environ)


def keys_file(settings: Settings) -> str:
    """File of the keys that clients need; empty: none are asked for."""
    return variables(settings).get("ASSAY_API_KEYS_FILE", "")


def environment(settings: Settings) -> dict[str, str]:
    """vLLM's environment: the caller's wins over the profile's, which wins over the defaults."""
    env = dict(DEFAULT_ENVIRONMENT)
    if Path(settings.model).is_dir():
        env |= LOCAL_MODEL_ENVIRONMENT
    env |= variables(settings)
    if (binding := thread_binding(settings)) is not None:
        env["VLLM_CPU_OMP_THREADS_BIND"] = binding
    env |= FORCED_ENVIRONMENT
    return env | {
        "ASSAY_BYPASS_KEY_FILE": str(settings.key_file),
        "ASSAY_REQUIRE": str(int(settings.require)),
        "ASSAY_RUN_DIR": str(settings.run_dir),
    }


def thread_binding(settings: Settings) -> str | None:
    """Cores for each worker where vLLM cannot choose them itself and nobody else did."""
    given = variables(settings)
    if "VLLM_CPU_OMP_THREADS_BIND" in given or "VLLM_CPU_SIM_MULTI_NUMA" in given:
        return None
    return host.thread_binding(
        arguments.ranks(settings.extra, read_profile(settings.profile)),
        host.numa_nodes(),
        host.physical_cores(),
        sorted(os.sched_getaffinity(0)),
    )


def read_profile(path: Path) -> dict[str, Any]:
    try:
        profile = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise LaunchError(f"cannot read the profile {path}: {_in_one_line(error)}", 2) from error
    if not isinstance(profile, dict):
        raise LaunchError(f"the profile {path} is not a table of vLLM's flags", 2)
    return {str(name): value for name, value in profile.items()}


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def read_env_file(path: Path) -> dict[str, str]:
    """KEY=VALUE lines, as `docker run --env-file` reads them: no quotes, `#` for comments."""
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line per change."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.terminal = sys.stdout.isatty()
        self.words = ""

    @property
    def seconds(self) -> int:
        return round(time.monotonic() - self.began)

    def show(self, words: str) -> None:
        if self.terminal:
            print(f"\r\033[K{self.seconds:>4} s  {words}", end="", flush=True)
        elif words != self.words:
            print(f"{self.seconds:>4} s  {words}", flush=True)
        self.words = words

    def clear(self) -> None:
        if self.terminal and self.words:
            print("\r\033[K", end="", flush=True)


class Server:
    """A vLLM server in the hands of a guard; what `start` has begun, `stop` ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.key = ""
        self.client = client.Client(settings.host, settings.port)
        self.titles: dict[int, str] = {}
        self.opened = False
        self.lock: IO[str] | None = None
        self.guard: subprocess.Popen[bytes] | None = None
        self.report: int | None = None
        self.root_pid: int | None = None

    def start(self) -> None:
        settings = self.settings
        self.lock = take(settings.state)
        make_afresh(settings.run_dir)
        self.key = door_key(settings.key_file)
        shm.clear(settings.state / "shm.json")
        procfs.adopt_orphans()
        command = [*settings.vllm, settings.model, "--config", str(settings.profile)]
        command += ["--host", settings.host, "--port", str(settings.port)]
        command += ["--middleware", "assay_kernels.vllm_plugin.door.ClosedDoor", *settings.extra]
        self.report, for_the_guard = os.pipe()
        guard = [sys.executable, "-m", "assay_kernels.launcher.guard", str(for_the_guard)]
        try:
            with logfile.sink(settings.log, settings.echo) as log:
                os.write(log, f"$ {shlex.join(command)}\n".encode())
                self.guard = subprocess.Popen(
                    [*guard, str(self.grace()), *command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment(settings),
                    pass_fds=[for_the_guard],
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"vLLM could not be started: {error}", 2) from error
        finally:
            os.close(for_the_guard)

    def grace(self) -> float:
        """Seconds between the wish to stop and the kill: what requests get, and a margin."""
        profile = read_profile(self.settings.profile)
        value = arguments.given(self.settings.extra, profile).get("--shutdown-timeout", "0")
        try:
            return float(value) + STOP_MARGIN_SECONDS
        except ValueError:
            raise LaunchError(
                f"shutdown-timeout must be a number of seconds, is {value!r}"
                f" (the profile {self.settings.profile} or an argument)",
                2,
            ) from None

    def stop(self) -> None:
        """Return once nothing of vLLM is running; raises LaunchError for what cannot be ended."""
        if self.guard is not None:
            self.close_door()
            assert self.guard.stdin is not None
            self.guard.stdin.close()
            # Before the door has opened there is no client's request to wait for.
            with suppress(subprocess.TimeoutExpired):
                self.guard.wait(None if self.opened else UNOPENED_STOP_SECONDS)
        left = self.kill()
        if self.report is not None:
            os.close(self.report)
        if self.lock is not None:
            self.lock.close()
        if left:
            raise LaunchError(f"vLLM is still ending, killed but not gone: pids {left}")

    def kill(self) -> list[int]:
        """End at once what is left below the launcher, the guard included; what does not end."""
        for _ in range(50):
            left = procfs.descendants(os.getpid())
            if not left:
                break
            procfs.signal_all(left, signal.SIGKILL)
            time.sleep(0.05)
        return procfs.descendants(os.getpid())

    def root(self) -> int | None:
        """pid of vLLM's first process, as the guard reported it; None until then."""
        if self.root_pid is None and self.report is not None:
            readable, _, _ = select.select([self.report], [], [], 0)
            line = os.read(self.report, 64) if readable else b""
            self.root_pid = int(line) if line else None
        return self.root_pid

    def processes(self) -> list[processes.Process]:
        root = self.root()
        found = [] if root is None else processes.of_vllm(root)
        self.titles |= {process.pid: process.title for process in found}
        return found

    def check_alive(self) -> None:
        assert self.guard is not None
        if self.guard.poll() is None:
            return
        lines = logfile.read(self.settings.log)
        self.check_plugin_imports(lines)
        reason = logfile.last_error(lines)
        if self.guard.returncode < 0:
            reason = "its guard was killed"
        elif self.guard.returncode == 128 + signal.SIGKILL:
            reason = "it was killed from outside (out of memory?)"
        elif reason is None:
            reason = f"no error in its log, exit code {self.guard.returncode}"
        raise LaunchError(f"vLLM ended: {reason}\n  log: {self.settings.log}")

    def check_plugin_imports(self, lines: list[str]) -> None:
        """Stop as soon as the log tells of a process in which vLLM could not import the plugin."""
        if not self.settings.require or not (failures := logfile.plugin_failures(lines)):
            return
        failure = failures[0]
        self.refuse([f"{self.name(failure.pid)} could not import the plugin: {failure.reason}"])

    def name(self, pid: int | None) -> str:
        """A process's title with its rank, for which a starting worker is given some time."""
        if pid is None:
            return "vLLM's API server"
        deadline = time.monotonic() + RANK_SECONDS
        while procfs.start_ticks(pid) is not None and time.monotonic() < deadline:
            self.titles[pid] = title = procfs.title(pid)
            if title.startswith("VLLM::") and title != "VLLM::Worker":
                break
            time.sleep(0.2)
        title = self.titles.get(pid, "")
        return f"{title if title.startswith('VLLM::') else 'a vLLM process'} (pid {pid})"

    def refuse(self, problems: list[str]) -> NoReturn:
        raise LaunchError(
            "the plugin is not active in every vLLM process, so nothing is served:\n"
            + "".join(f"  {problem}\n" for problem in problems)
            + f"  log: {self.settings.log}; to serve without this check: ASSAY_REQUIRE=0"
        )

    def wait_until_healthy(self, progress: Progress) -> None:
        deadline = time.monotonic() + self.settings.start_seconds
        while True:
            lines = logfile.read(self.settings.log)
            progress.show(logfile.stage(lines))
            self.processes()
            self.check_alive()
            self.check_plugin_imports(lines)
            if self.client.healthy():
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"vLLM was not ready after {self.settings.start_seconds:.0f} s"
                    f" ({logfile.stage(lines)})\n  log: {self.settings.log}"
                )
            time.sleep(0.5)

    def verify_door(self) -> None:
        """A client must be told to wait, now that the server answers."""
        try:
            status = self.client.status_without_key(BEHIND_THE_DOOR)
        except client.NoAnswerError as error:
            self.check_alive()
            raise LaunchError(f"the server {error}\n  log: {self.settings.log}") from error
        expected = 401 if keys_file(self.settings) else 503
        if status != expected:
            raise LaunchError(
                "the closed door is not in front of the server, so it was ended:"
                f" {BEHIND_THE_DOOR} answered {status} without the key, not {expected}\n"
                f"  log: {self.settings.log}"
            )

    def verify_plugin(self) -> list[proof.Proof]:
        """Every vLLM process's proof; refuses, or warns, when one is missing."""
        found = self.processes()
        proofs = proof.read_all(self.settings.run_dir)
        wrong = processes.unproven(found, proofs, is_quantised(self.settings.model))
        if not wrong:
            return proofs
        failures = logfile.plugin_failures(logfile.read(self.settings.log))
        reasons = {failure.pid: failure.reason for failure in failures}
        allowed = os.environ.get("VLLM_PLUGINS")
        problems = []
        for pid, what in wrong.items():
            if pid in reasons:
                what += f": {reasons[pid]}"
            elif allowed is not None and "assay" not in allowed.split(","):
                what += f": VLLM_PLUGINS={allowed} does not name assay"
            problems.append(what)
        if self.settings.require:
            self.refuse(problems)
        for problem in problems:
            print(f"warning: {problem}", flush=True)
        return proofs

    def assay(self) -> ready.Report:
        """Ask the ready tier of the profile's suite through the door's side entrance; raises
        LaunchError, or warns, when the server is not found sound."""
        settings = self.settings
        with ready.Asking(
            variables(settings), self.client.url, settings.key_file, settings.run_dir
        ) as asking:
            while not asking.ended(0.2):
                self.check_alive()
        report = asking.report()
        if report.passed:
            return report
        self.check_alive()
        words = report.words()
        if self.settings.require:
            raise LaunchError(f"{words}, so nothing is served\n  log: {self.settings.log}")
        print(f"warning: {words}", flush=True)
        return report

    def wait_for_canary(self) -> None:
        """Until somebody else, who holds the bypass key, has opened the door."""
        while not (self.settings.run_dir / "open").exists():
            self.check_alive()
            time.sleep(0.5)
        self.opened = True

    def open_door(self) -> None:
        self.opened = True
        (self.settings.run_dir / "open").touch()

    def close_door(self) -> None:
        with suppress(OSError):  # an end is an end: the server behind the door goes too
            (self.settings.run_dir / "open").unlink(missing_ok=True)

    def watch(self) -> NoReturn:
        seconds = stalled_after(self.settings)
        dog = watchdog.Watchdog(self.client, self.key, seconds)
        if seconds:
            dog.start()
        shm.record(self.settings.state / "shm.json", procfs.descendants(os.getpid()))
        while dog.verdict is None:
            self.check_alive()
            time.sleep(0.5)
        self.close_door()
        self.kill()  # nothing in it would answer a wish to stop
        raise LaunchError(f"the server was ended because {dog.verdict}\n  log: {self.settings.log}")


def take(state: Path) -> IO[str]:
    """Claim the state folder for this launcher; released by the kernel, however it ends."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (state / "lock").open("w")
    except OSError as error:
        raise LaunchError(f"cannot keep run files in {state}: {error}", 2) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise LaunchError(
            f"another server uses {state}; give this one a folder of its own: --state-dir", 2
        ) from None
    return file


def make_afresh(run_dir: Path) -> None:
    """An empty folder for the owner alone: a file `open` left in it would open the next door."""
    try:
        (run_dir / "open").unlink(missing_ok=True)
        if run_dir.exists():
            shutil.rmtree(run_dir)
        run_dir.mkdir(mode=0o700)
        (run_dir / "proof").mkdir(mode=0o700)
    except OSError as error:
        raise LaunchError(f"cannot make {run_dir} afresh: {error}", 2) from error


def door_key(path: Path) -> str:
    """The door's key in its file, for the owner alone. One that an earlier start left is kept: the
    canary beside the server knows it."""
    try:
        with suppress(FileNotFoundError):
            found = path.stat()
            private = found.st_uid == os.getuid() and not found.st_mode & 0o077
            if private and (key := path.read_text().strip()):
                return key
            path.unlink()
        key = secrets.token_urlsafe(24)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(f"{key}\n")
    except OSError as error:
        raise LaunchError(f"cannot keep the door's key in {path}: {error.strerror}", 2) from error
    return key


def announce(settings: Settings) -> None:
    print(f"assay {__version__}: {settings.model}, profile {settings.profile}, log {settings.log}")
    operators = cpu_operators(variables(settings))
    print(f"cpu: {host.Cpu.here().describe(operators)}")
    if (binding := thread_binding(settings)) is not None:
        print(f"cpu: more workers than NUMA nodes, so VLLM_CPU_OMP_THREADS_BIND={binding}")
    for line in host.Gpus.here().advice(settings.profile.parent):
        print(line)
    sys.stdout.flush()


def announce_ready(
    server: Server, proofs: list[proof.Proof], progress: Progress, report: ready.Report | None
) -> None:
    summaries = [p.summary for p in proofs if p.summary is not None]
    print(f"ready after {progress.seconds} s; {len(proofs)} processes run the plugin")
    for table in dict.fromkeys(summary.table() for summary in summaries):
        print(table)
    if report is None:
        print(f"\nthe canary has opened the door: {server.client.url}/v1")
    else:
        print(f"\n  {report.words()}")
        if report.question:
            print(f"  Q: {report.question}\n  A: {report.answer}")
        print(f"\n{server.client.url}/v1   model: {report.model}")
        body = json.dumps(client.body(report.model, report.question or "Hello"))
        key = " -H 'Authorization: Bearer ...'" if keys_file(server.settings) else ""
        print(
            f"curl -s {server.client.url}/v1/chat/completions{key}"
            f" -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        )
    print("Ctrl-C stops it.", flush=True)


class StopSignals:
    """The wish to stop interrupts what the launcher does, but neither the start of vLLM, which
    could then be forgotten, nor its end; a second wish ends everything at once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.wished = False
        self.may_interrupt = True

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.receive)

    def receive(self, _number: int, _frame: FrameType | None) -> None:
        if self.wished:
            self.server.kill()
        self.wished = True
        if self.may_interrupt:
            self.may_interrupt = False
            raise StopRequested

    def start(self) -> None:
        self.may_interrupt = False
        self.server.start()
        self.may_interrupt = True
        if self.wished:
            self.may_interrupt = False
            raise StopRequested

    def stop(self) -> None:
        self.may_interrupt = False
        self.wished = True
        self.server.stop()


def run(server: Server, signals: StopSignals) -> NoReturn:
    """From nothing to an open door, until vLLM ends or a stop is asked for."""
    check(server.settings)
    announce(server.settings)
    progress = Progress()
    try:
        signals.start()
        server.wait_until_healthy(progress)
        server.verify_door()
        progress.show("checking that every process runs the plugin")
        proofs = server.verify_plugin()
        suite, report = ready.suite(variables(server.settings)), None
        if suite == ready.CANARY:
            progress.show("waiting for a canary to open the door")
            server.wait_for_canary()
        else:
            progress.show(f"asking the suite {suite}")
            report = server.assay()
            server.open_door()
        progress.clear()
        announce_ready(server, proofs, progress, report)
        server.watch()
    finally:
        progress.clear()


def serve(settings: Settings) -> int:
    """Run until asked to stop, then return 0; raises LaunchError on any other end."""
    server = Server(settings)
    signals = StopSignals(server)
    try:
        try:
            # Once either line has ended, by an exception or not, no signal interrupts any more.
            try:
                signals.listen()
                run(server, signals)
            finally:
                signals.may_interrupt = False
        finally:
            if server.guard is not None and server.guard.poll() is None:
                print("stopping ...", flush=True)
            signals.stop()
    except StopRequested:
        print("stopped", flush=True)
        return 0
