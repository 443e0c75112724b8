"""What all tests share: one thread per process, and the workers of the tests that need several."""

from __future__ import annotations

from tests import device  # isort: skip  # before torch: FXPIPE_DEVICE=cuda simulates it
import contextlib
import gc
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import forked_server, on_gpus
from tests.gpus import Gpus, require
from tests.pool import RARELY, Pool, preloads
from tests.scripts import Scripts
from tests.thinned import ALL

SLOW = """
    distributed/test_launch.py
    distributed/test_processes.py
    distributed/test_topology.py the_mesh the_data_mesh
    loops/
    schedules/show/test_svg_picture.py a_long_table
    parameters/test_materialise.py a_rank_needs
    distributed/test_collective.py what_fails_beside_a_gpu
    parameters/test_materialise_hf.py
    passes/test_partition_random.py
    search/test_auto.py
    search/test_balance.py
    plan/test_recomputation.py auto
    capture/test_signatures.py
    plan/test_stage_compiler.py
    run/test_measured_timeline.py
    run/test_recompute.py
    run/test_saving.py killed another
    schedules/test_lower_bound.py
    schedules/test_verify.py no_ verify_and_the_simulator
    schedules/test_families_closed_forms.py
    schedules/test_gathered.py
    schedules/test_table.py printing what_is_shown
    sharding/test_data_axis.py
    sharding/test_reducer.py
    simulated_gpu/test_scripts.py
    test_command_line.py
    test_doctor.py
    test_imports.py any_name
    trace/test_every_tracer.py
    trace/test_hidden_values.py
    trace/test_operations.py
    trace/test_record.py a_checkpointed
    trace/test_symbolic.py torch_compile_works
    whole/
"""
"""What takes seconds: a folder or file in ``tests/`` a line, and behind it how its tests' names begin, if not all."""
LONGEST = """
    faults/test_faults.py
    plan/test_joint_graph.py
    whole/test_benchmarks.py
    whole/test_hf_batches.py
    whole/test_loops.py
    whole/test_on_gpus.py
    whole/test_readme.py
    whole/test_without_numpy.py
"""
"""Files with tests of many seconds each: of several processes, none shall run one alone at the end."""
LONG = """
    batch/test_objects.py stand_ins_are_the_same_in_every_process
    distributed/test_heartbeat.py ranks_are_heard_again_after_a_fault_of_the_network[silent
    faults/
    loops/test_lightning.py one_process_trains_as_a_plain_trainer[bf16 a_run_goes_on four two_gpus
    loops/test_lightning.py one_process_trains_as_a_plain_trainer[accumulated one_process_trains_as_a_plain_trainer[by
    numerics/test_bisect.py a_mask_that_only_a_capture another_tracer
    loops/test_accelerate.py
    loops/test_transformers.py a_resumed bf16 it_goes_on it_trains_as_the_trainer_does[accumulated
    loops/test_transformers.py it_trains_as_the_trainer_does[best it_trains_as_the_trainer_does[small
    loops/test_transformers.py it_trains_as_the_trainer_does[smoothed it_trains_as_the_trainer_does[uncounted on_gpus
    loops/test_transformers.py random_words
    loops/test_torchtitan.py
    parameters/test_materialise_hf.py
    parameters/test_meta.py initialised_on_each_rank[where2-export
    plan/test_joint_graph.py of_shards
    plan/test_joint_graph.py gradients_are_those_of_whole_backwards_and_each_part_is_compiled_once[{'recompute'
    run/test_saving.py killed
    sharding/test_parallelize.py an_unmodified_llama
    simulated_gpu/test_scripts.py a_script_may_end ranks_may_end
    test_notebook.py a_function_of_a_cell
    trace/test_every_tracer.py over_replicas
    trace/test_hidden_values.py each_is
    trace/test_symbolic.py torch_compile_works
    whole/test_auto_opaque.py cuts_found parts
    whole/test_batch_axes.py a_checkpoint a_rank_never_holds an_expert_axis dense eight fsdp2
    whole/test_batch_axes.py ranks_train_as_plain_pytorch_does[context2 ranks_train_as_plain_pytorch_does[data2
    whole/test_batch_axes.py ranks_train_as_plain_pytorch_does[expert4 schedules
    whole/test_batch_axes_hf.py attention_that_parallelize_cannot_change llama what_a_model_would_count
    whole/test_batch_axes_hf.py experts_spread_over_ranks_train_as_in_plain_pytorch
    whole/test_benchmarks.py
    whole/test_detector.py
    whole/test_fuzzed.py
    whole/test_gathered.py open_clips
    whole/test_gathered_options.py evaluate_re
    whole/test_growth.py
    whole/test_hf.py
    whole/test_hf_batches.py
    whole/test_killed_rank.py
    whole/test_layers_left_out.py layers_that_a_batch_leaves_out[model0 layers_that_a_batch_leaves_out[model2
    whole/test_lengths.py
    whole/test_loops.py
    whole/test_masters.py the_buffers_of_zero_2
    whole/test_number_of_items.py a_model_that_is_given
    whole/test_on_gpus.py a_model_trains_as_in_plain_pytorch[GPT-2 a_model_trains_as_in_plain_pytorch[Llama more
    whole/test_on_gpus.py programs
    whole/test_once_refused.py an_adapted_model models_of_hugging_face
    whole/test_opaque.py what_a_region_returns_has_another_size_each_time[strict
    whole/test_opaque_runs.py a_list its_parameters
    whole/test_optimizer_checkpoints.py a_plain_optimizer a_run_goes_on_in masters
    whole/test_orderings.py
    whole/test_packed_inputs.py evaluate_gives random so_it_is_on_ranks_of_which_each_is_given_what_it_needs[lists
    whole/test_questions.py an_input_that_no_rank batches_of_other_sizes each_number each_outcome replicas_may
    whole/test_questions.py what_is_asked_behind_an_opaque
    whole/test_random_models.py
    whole/test_random_tables.py
    whole/test_readme.py a_command_of_a_page_prints_what_stands_below_it[data_axis.md]
    whole/test_readme.py a_command_of_a_page_prints_what_stands_below_it[schedules.md]
    whole/test_readme.py the_code_of_a_page_runs_and_prints_what_it_shows[axes.md]
    whole/test_readme.py the_code_of_a_page_runs_and_prints_what_it_shows[loops_lightning.md]
    whole/test_readme.py the_code_of_a_page_runs_and_prints_what_it_shows[other_loops.md]
    whole/test_readme.py the_code_of_a_page_runs_and_prints_what_it_shows[preview.md]
    whole/test_readme.py the_code_of_a_page_runs_and_prints_what_it_shows[real_models.md]
    whole/test_readme.py the_code_of_a_page_runs_and_prints_what_it_shows[vision_language.md]
    whole/test_resume.py
    whole/test_same_operators.py a_step_runs_the_operators_of_plain_pytorch[BERT
    whole/test_same_operators.py a_step_runs_the_operators_of_plain_pytorch[Whisper
    whole/test_save_load.py a_place_in a_run_of_four
    whole/test_several_sharded.py it_trains_as_plain_pytorch_and_resumes_with_the_same_bits[FSDP2-4-False
    whole/test_several_sharded.py it_trains_as_plain_pytorch_and_resumes_with_the_same_bits[zero=3-3-False
    whole/test_strings.py batches_of_other_sizes one_of_many other_strings_take_no_capture[Branching
    whole/test_strings.py other_strings_take_no_capture[InDict
    whole/test_virtual_time.py a_step_takes each
    whole/test_without_numpy.py
"""
"""Published models, benchmarks, the loops of examples/, ranks that are killed, runs that are resumed, random cases: a
third of the suite's time. A run of the whole suite leaves them to ``-m long``, which ``.ci/run`` runs as well."""

MOST_SECONDS = float(os.environ.get("FXPIPE_MOST_SECONDS", "inf"))
"""How long a run begins tests. Later tests are skipped, and the summary says so."""
BEGAN = time.monotonic()

os.environ.setdefault("RES_OPTIONS", "attempts:1 timeout:1")
"""torch asks for the name of each address that it connects to: 5 s wherever a name server does not answer."""
sys.dont_write_bytecode = False  # the other processes of the suite, some hundred, need not compile fxpipe again
torch.set_num_threads(1)  # thread counts change bits
device.place()
torch.manual_seed(0)  # for what test modules make when they are imported


@pytest.fixture(autouse=True)
def _same_surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test draws the same numbers in every run, whichever others run before it, and prints as wide."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed would format a stack for each kind of device
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    monkeypatch.delenv("COLUMNS", raising=False)
    yield
    device.check()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each of several processes compiles a part of all tests and reads those of others: rewriting takes seconds."""
    worker, tests = os.environ.get("PYTEST_XDIST_WORKER"), Path(__file__).parent
    if worker is None or not _is_whole_suite(session.config):
        return
    files, workers = sorted(tests.rglob("test_*.py")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    first, last = (len(files) * turn // workers for turn in (int(worker[2:]), int(worker[2:]) + 1))
    for file in files[first:last]:
        with contextlib.suppress(pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(tests.parent).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there now, torch and the tests, is looked through for garbage no more: that took a tenth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(RARELY)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Here no test has run, and no filter of warnings is set; what workers write is captured as what tests write is."""
    needed = any(item.get_closest_marker("processes") for item in session.items)
    capture = session.config.pluginmanager.getplugin("capturemanager")
    if needed and capture and not session.config.option.collectonly and forked_server.can():
        capture.resume_global_capture()
        forked_server.start(preloads())
        capture.suspend_global_capture()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for ``pool.run(fn, *args, ranks=4)``; none is left at the end."""
    workers = Pool()
    try:
        yield workers
    finally:
        workers.close()


@pytest.fixture(scope="session")
def scripts() -> Iterator[Scripts]:
    """``scripts.run(arguments, folder)``: what a Python program prints, run in a process of its own, whose hashes of
    strings are not this process's."""
    root = str(Path(__file__).parents[1])
    server = Scripts(PYTHONPATH=root, OMP_NUM_THREADS="1", COLUMNS="120", PYTHONHASHSEED="1")
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def gpus() -> Iterator[Gpus]:
    """Worker processes on simulated GPUs for ``gpus.run(fn, *args, ranks=2)``, of which none is left at the end."""
    require()
    workers = Gpus()
    try:
        yield workers
    finally:
        workers.close()


@pytest.fixture(scope="session")
def gpu_scripts() -> Iterator[Scripts]:
    """As ``scripts``, with simulated GPUs."""
    require()
    root = str(Path(__file__).parents[1])
    server = Scripts(PYTHONPATH=root, OMP_NUM_THREADS="1", COLUMNS="120", FXPIPE_DEVICE="cuda")
    try:
        yield server
    finally:
        server.close()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "processes: uses the pool of worker processes")
    config.addinivalue_line("markers", "gpu: runs on simulated GPUs (tests/simulated_gpu)")
    config.addinivalue_line("markers", "slow: takes seconds, and is listed in tests/conftest.py")
    config.addinivalue_line("markers", "long: runs with -m long, where it is named, or with FXPIPE_ALL=1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``pytest -m "not processes and not slow"`` is the short way through."""
    slow, long, first = map(on_gpus.beginnings, (SLOW, LONG, on_gpus.FIRST))

    def is_long(item: pytest.Item) -> bool:
        later = device.DEVICE == "cuda" and (item.nodeid.startswith(slow) or not item.nodeid.startswith(first))
        return later or item.nodeid.startswith(long) or item.get_closest_marker("long") is not None

    if _is_whole_suite(config) and not (config.option.markexpr or config.option.keyword or ALL):
        config.hook.pytest_deselected(items=[item for item in items if is_long(item)])
        items[:] = [item for item in items if not is_long(item)]
    items[:] = _longest_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    for item in items:
        if is_long(item):
            item.add_marker("long")
        if item.nodeid.startswith(slow) or "four_times" in item.name:  # which counts each line that runs
            item.add_marker("slow")
        call = getattr(item, "callspec", None)
        if device.DEVICE == "cuda" and (why := on_gpus.reason(item.nodeid, device.SIMULATED)):
            item.add_marker(pytest.mark.skip(reason=why))
        if {"gpus", "gpu_scripts"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("gpu")
        if "pool" in getattr(item, "fixturenames", ()) or (call and "distributed" in call.params.values()):
            item.add_marker("processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - BEGAN > MOST_SECONDS:
        pytest.skip(f"the {MOST_SECONDS:.0f} seconds of FXPIPE_MOST_SECONDS are over")


def _is_whole_suite(config: pytest.Config) -> bool:
    return [Path(name).resolve() for name in config.args] == [Path(__file__).parent]


def _longest_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """So many parts of one length, as worksteal deals them out at first, each with some of the longest in front.

    All tests that need one server stand in front of one part, so that one worker starts it, and takes seconds once.
    """
    if workers == 1:
        return items
    first: dict[int | None, list[pytest.Item]] = {}
    for item in items:
        first.setdefault(_worker_of(item, workers), []).append(item)
    others, ordered = first.pop(None, []), list[pytest.Item]()
    for worker in range(workers):
        ordered += first.get(worker, [])
        size = max((worker + 1) * len(items) // workers - len(ordered), 0)
        ordered += others[:size]
        del others[:size]
    return ordered + others


def _worker_of(item: pytest.Item, workers: int) -> int | None:
    """The worker that begins with a test, by its server or its file; None where any may run it at any time."""
    fixtures = getattr(item, "fixturenames", ())
    numbers = [number for number, server in enumerate(("gpus", "scripts", "gpu_scripts")) if server in fixtures]
    numbers += [number for number, name in enumerate(LONGEST.split()) if item.nodeid.startswith(f"tests/{name}")]
    return numbers[0] % workers if numbers else None
