"""Reasons are read out of vLLM's log as vLLM 0.32 writes it."""

from assay_kernels.launcher import logfile

WORKER_FAILS = """\
(EngineCore pid=41) INFO 11-30 18:00:01 [core.py:120] Initializing a V1 LLM engine (v0.32.0)
(Worker_TP1 pid=43) ERROR 11-30 18:00:05 [multiproc_executor.py:900] WorkerProc failed to start.
(Worker_TP1 pid=43) ERROR 11-30 18:00:05 [multiproc_executor.py:900] Traceback (most recent call):
(Worker_TP1 pid=43) ERROR 11-30 18:00:05 [multiproc_executor.py:900]   File "x.py", line 1, in f
(Worker_TP1 pid=43) ERROR 11-30 18:00:05 [multiproc_executor.py:900] KeyError: 'layers.3.attn.wo_a'
(EngineCore pid=41) Exception: WorkerProc initialization failed due to an exception in a worker.
(EngineCore pid=41) Traceback (most recent call last):
(APIServer pid=40) RuntimeError: Engine core initialization failed. See root cause above.
[rank0]: resource_tracker: There appear to be 1 leaked shared_memory objects
"""

PLUGIN_FAILS = """\
(APIServer pid=40) INFO 11-30 18:00:01 [utils.py:100] non-default args: {}
(Worker pid=44) ERROR 11-30 18:00:02 [__init__.py:73] Failed to load plugin assay
(Worker pid=44) ERROR 11-30 18:00:02 [__init__.py:73] Traceback (most recent call last):
(Worker pid=43) INFO 11-30 18:00:02 [parallel_state.py:1] rank 0
(Worker pid=44) ERROR 11-30 18:00:02 [__init__.py:73]   File "__init__.py", line 71, in load
(Worker pid=44) ERROR 11-30 18:00:02 [__init__.py:73]     func = plugin.load()
(Worker pid=44) ERROR 11-30 18:00:02 [__init__.py:73]            ^^^^^^^^^^^^^
(Worker pid=44) ERROR 11-30 18:00:02 [__init__.py:73] ImportError: libgomp.so.1: cannot open
(Worker pid=44) INFO 11-30 18:00:03 [parallel_state.py:1] rank 1
(Worker pid=44) RuntimeError: something later
"""


def test_the_reason_is_the_first_error_and_not_its_echoes() -> None:
    assert (
        logfile.last_error(WORKER_FAILS.splitlines())
        == "Worker_TP1: KeyError: 'layers.3.attn.wo_a'"
    )


def test_a_chained_exception_gives_its_last_link() -> None:
    text = "ValueError: bad\nDuring handling of the above\nassay.CheckpointError: shard 2: wq_a\n"
    assert logfile.last_error(text.splitlines()) == "assay.CheckpointError: shard 2: wq_a"


def test_a_misspelt_argument_is_a_reason() -> None:
    text = "usage: vllm serve [options]\nvllm serve: error: unrecognized arguments: --max-len\n"
    assert (
        logfile.last_error(text.splitlines())
        == "vllm serve: error: unrecognized arguments: --max-len"
    )


def test_a_log_without_an_error_gives_no_reason() -> None:
    assert logfile.last_error(["INFO 11-30 18:00:01 [a.py:1] all is well"]) is None


def test_an_engine_that_dies_without_a_word_is_named() -> None:
    text = (
        "(APIServer pid=7) ERROR 11-30 18:00:01 [a.py:1] vllm.v1.EngineDeadError: EngineCore died\n"
    )
    assert "EngineCore" in (logfile.last_error(text.splitlines()) or "")


def test_a_failed_plugin_import_is_told_with_its_process_and_cause() -> None:
    (failure,) = logfile.plugin_failures(PLUGIN_FAILS.splitlines())
    assert failure.pid == 44
    assert failure.reason == "ImportError: libgomp.so.1: cannot open"


def test_another_plugin_s_failure_is_not_ours() -> None:
    other = PLUGIN_FAILS.replace("plugin assay", "plugin lora_filesystem_resolver")
    assert logfile.plugin_failures(other.splitlines()) == []


def test_the_stage_is_the_latest_that_the_log_tells() -> None:
    assert logfile.stage([]) == "starting vLLM"
    assert logfile.stage(WORKER_FAILS.splitlines()) == "starting the engine"
