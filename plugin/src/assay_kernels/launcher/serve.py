"""`assay-kernels serve`: from a checkpoint to an endpoint whose first answer has been seen."""

import fcntl
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import yaml

from assay_kernels import __version__
from assay_kernels.launcher import client, host, logfile, processes, procfs
from assay_kernels.vllm_plugin import proof

QUESTION = "What is the capital of France?"
STOP_MARGIN_SECONDS = 20.0
"""Beyond vLLM's own shutdown-timeout: time to end processes after the last request."""
RANK_SECONDS = 20.0
"""How long a worker without the plugin may take to say its rank before it is named without one."""

DEFAULT_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_NO_USAGE_STATS": "1",
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
    vllm: tuple[str, ...] = field(
        default=(sys.executable, "-m", "assay_kernels.launcher.vllm_main", "serve")
    )

    @property
    def log(self) -> Path:
        return self.state / "serve.log"

    @property
    def run_dir(self) -> Path:
        return self.state.absolute() / "run"


def check(settings: Settings) -> None:
    """Refuse what cannot work before anything is started."""
    if (obstacle := host.Cpu.here().obstacle()) is not None:
        raise LaunchError(obstacle, 2)
    if not settings.profile.is_file():
        raise LaunchError(f"there is no profile {settings.profile}", 2)
    folder = Path(settings.model)
    looks_local = folder.exists() or settings.model.startswith((".", "/", "models/"))
    if looks_local and not (folder / "config.json").is_file():
        raise LaunchError(f"{settings.model} holds no checkpoint (no config.json)", 2)
    if (obstacle := host.port_obstacle(settings.host, settings.port)) is not None:
        raise LaunchError(obstacle, 2)


def is_quantised(model: str) -> bool:
    """Whether the checkpoint says that it is; a model that is not a local folder counts as such."""
    folder = Path(model)
    if not folder.is_dir():
        return True
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return "quantization_config" in config or (folder / "hf_quant_config.json").is_file()


def environment(settings: Settings, key: str) -> dict[str, str]:
    """vLLM's environment: the caller's wins over the profile's, which wins over the defaults."""
    env = dict(DEFAULT_ENVIRONMENT)
    if Path(settings.model).is_dir():
        env |= LOCAL_MODEL_ENVIRONMENT
    variables = settings.profile.with_suffix(".env")
    if variables.is_file():
        env |= read_env_file(variables)
    env |= os.environ
    env |= {
        "ASSAY_BYPASS_KEY": key,
        "ASSAY_REQUIRE": str(int(settings.require)),
        "ASSAY_RUN_DIR": str(settings.run_dir),
        # The processes are told apart by their titles.
        "VLLM_PROCESS_NAME_PREFIX": "VLLM",
    }
    return env


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
    """A vLLM server in the hands of a guard; a context manager that leaves nothing running."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.key = secrets.token_urlsafe(24)
        self.client = client.Client(settings.host, settings.port, self.key)
        self.titles: dict[int, str] = {}

    def __enter__(self) -> "Server":
        settings = self.settings
        self.lock = take(settings.state)
        shutil.rmtree(settings.run_dir, ignore_errors=True)
        (settings.run_dir / "proof").mkdir(mode=0o700, parents=True)
        procfs.adopt_orphans()
        command = [*settings.vllm, settings.model, "--config", str(settings.profile)]
        command += ["--host", settings.host, "--port", str(settings.port)]
        command += ["--middleware", "assay_kernels.vllm_plugin.door.ClosedDoor", *settings.extra]
        guard = [sys.executable, "-m", "assay_kernels.launcher.guard", str(self.grace())]
        with settings.log.open("w") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            self.guard = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(settings, self.key),
                start_new_session=True,
            )
        return self

    def grace(self) -> float:
        """Seconds between the wish to stop and the kill: the profile's own and a margin."""
        profile = yaml.safe_load(self.settings.profile.read_text()) or {}
        return float(profile.get("shutdown-timeout", 0)) + STOP_MARGIN_SECONDS

    def __exit__(self, *_: object) -> None:
        self.close_door()
        assert self.guard.stdin is not None
        self.guard.stdin.close()
        self.guard.wait()
        self.kill()
        self.lock.close()

    def kill(self) -> None:
        """End at once whatever is left below the launcher, the guard included."""
        for _ in range(50):
            left = procfs.descendants(os.getpid())
            if not left:
                return
            procfs.signal_all(left, signal.SIGKILL)
            time.sleep(0.05)

    def root(self) -> int | None:
        """pid of vLLM's first process."""
        below = procfs.descendants(self.guard.pid)
        return below[0] if below else None

    def processes(self) -> list[processes.Process]:
        root = self.root()
        found = [] if root is None else processes.of_vllm(root)
        self.titles |= {process.pid: process.title for process in found}
        return found

    def check_alive(self) -> None:
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

    def first_answer(self) -> tuple[str, str]:
        """(model name, text): one real completion, through the door's side entrance."""
        try:
            model = self.client.model()
            return model, self.client.ask(model, QUESTION, timeout=600)
        except client.NoAnswerError as error:
            self.check_alive()
            raise LaunchError(f"the server {error}\n  log: {self.settings.log}") from error

    def open_door(self) -> None:
        (self.settings.run_dir / "open").touch()

    def close_door(self) -> None:
        (self.settings.run_dir / "open").unlink(missing_ok=True)

    def watch(self) -> NoReturn:
        while True:
            self.check_alive()
            time.sleep(0.5)


def take(state: Path) -> IO[str]:
    """Claim the state folder for this launcher; released by the kernel, however it ends."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = (state / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise LaunchError(
            f"another server uses {state}; give this one a folder of its own: --state-dir", 2
        ) from None
    return file


def announce(settings: Settings) -> None:
    print(f"assay {__version__}: {settings.model}, profile {settings.profile}, log {settings.log}")
    operators = os.environ.get("ASSAY_CPU_OPS", "auto")
    print(f"cpu: {host.Cpu.here().describe(operators)}")
    for line in host.Gpus.here().advice(settings.profile.parent):
        print(line)
    sys.stdout.flush()


def announce_ready(
    server: Server, proofs: list[proof.Proof], progress: Progress, model: str, answer: str
) -> None:
    summaries = [p.summary for p in proofs if p.summary is not None]
    curl = json.dumps(client.body(model, QUESTION))
    print(f"ready after {progress.seconds} s; {len(proofs)} processes run the plugin")
    for table in dict.fromkeys(summary.table() for summary in summaries):
        print(table)
    print(f"\n  Q: {QUESTION}\n  A: {answer}\n\n{server.client.url}/v1   model: {model}")
    print(
        f"curl -s {server.client.url}/v1/chat/completions"
        f" -H 'Content-Type: application/json' -d {shlex.quote(curl)}"
    )
    print("Ctrl-C stops it.", flush=True)


def serve(settings: Settings) -> int:
    """Run until asked to stop, then return 0; raises LaunchError on any other end."""
    check(settings)
    announce(settings)
    progress = Progress()
    server = Server(settings)
    stopping = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            server.kill()
        stopping = True
        raise StopRequested

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    try:
        with server:
            try:
                server.wait_until_healthy(progress)
                progress.show("checking that every process runs the plugin")
                proofs = server.verify_plugin()
                progress.show("asking the first question")
                model, answer = server.first_answer()
                server.open_door()
                progress.clear()
                announce_ready(server, proofs, progress, model, answer)
                server.watch()
            finally:
                progress.clear()
                stopping = True
                if server.guard.poll() is None:
                    print("stopping ...", flush=True)
    except StopRequested:
        print("stopped", flush=True)
        return 0
