"""Where the tests of a source file are: in the file of its name, or in those that ``TABLE`` names.

``fxpipe/plan/placement.py`` is tested by ``tests/plan/test_placement.py``. Files that are tested as one whole stand in
the table: source files or a folder of them, and behind the colon the tests, from ``tests/`` on, without ``test_``.
"""

from __future__ import annotations

from pathlib import Path

from tests.conftest import LONGEST, SLOW

ROOT = Path(__file__).parents[1]

TABLE = """
compiler: options whole/transparency
in_words: options distributed/watchdog
kinds: whole/wrong_inputs options
labels: run/labelled
small_file: whole/wrong_inputs
torch_compat: imports
distributed/broadcast: sharding/reducer
distributed/activity: distributed/watchdog
distributed/crash_report: distributed/watchdog
distributed/heartbeat: distributed/watchdog
distributed/preflight: distributed/watchdog
run/settings: distributed/watchdog
distributed/connect: distributed/strict_transport distributed/torch_transport
distributed/grid: distributed/topology
distributed/live_groups: distributed/topology
distributed/gathering: whole/save_load run/saving
distributed/stopwatch: run/measured_timeline
distributed/transport: distributed/strict_transport distributed/torch_transport
formats/words: formats/svg_picture formats/html_page
graph/gathering: run/group_inputs
graph/kept: whole/kept_whole
graph/like: trace/operations whole/bugs_values
graph/modes: whole/autocast trace/record
graph/program: passes/partition trace/symbolic
graph/root: trace/every_tracer
graph/size_of: whole/lengths
graph/topological: passes/partition graph/stage_graph
parameters/dtensors: sharding/parallelize
parameters/initialise: parameters/materialise parameters/materialise_hf
parameters/own_buffers: whole/save_load
parameters/ownership: parameters/materialise sharding/fully_sharded
parameters/saving/: parameters/saving
parameters/unwritten: parameters/materialise
parameters/weight_files: parameters/weights
plan/agreement: whole/refusals whole/bugs_values plan/signatures
plan/balancing: plan/auto plan/previewed
plan/balance/: plan/balance plan/node_costs plan/auto
plan/batch: whole/refusals plan/signatures
plan/captures: plan/signatures
plan/closeness: plan/capture_check
plan/data_traffic: plan/previewed
plan/example: plan/planner
plan/forecast: plan/previewed plan/memory
plan/groups: whole/gathered
plan/label_count: whole/whole_batch plan/signatures
plan/looks: whole/lengths
plan/methods: whole/kept_whole
plan/observed: whole/kept_whole
plan/outside: whole/kept_whole
plan/on_fakes: plan/node_costs plan/row_places
plan/plan: plan/planner
plan/pattern: plan/signatures
plan/replay: plan/capture_check
plan/sizes: whole/lengths plan/signatures
plan/same_stages: plan/signatures whole/absent
plan/tables: plan/planner plan/recomputation
plan/together: whole/refusals whole/gathered_options
plan/told: whole/refusals plan/signatures
plan/varying: whole/lengths plan/signatures
run/actions: run/bind run/executor run/notes
run/written_parameters: run/recompute
run/failing: whole/refusals whole/bugs_refusals
run/forward_backward: whole/transparency
run/halves: run/bind run/notes
run/group_actions: run/bind run/group_inputs
run/item_numbers: whole/whole_batch
run/random_state: whole/save_load
run/run_state: whole/save_load run/loading
run/optimizer_fit: run/loading
run/save_job: run/saving
run/save_later: run/saving
run/rank_state: parameters/meta parameters/materialise
run/recompute_actions: run/bind run/recompute
run/replicas: run/evaluate
run/side_effects: run/recompute
run/step: whole/transparency run/executor
run/step_outcome: run/finite graph/loss
run/timeline_recorder: run/measured_timeline
run/to_host: run/batch_check run/finite
run/user_warning: run/batch_check
schedules/dependency: schedules/lower schedules/verify
schedules/given: whole/wrong_inputs
schedules/families/: schedules/families schedules/families_closed_forms schedules/lower_bound
schedules/no_gc: schedules/families
sharding/flat_bucket: sharding/reducer
sharding/fsdp: sharding/fully_sharded sharding/parallelize
sharding/fsdp_gradients: sharding/fully_sharded
sharding/optimizer_class: sharding/distributed_optimizer
sharding/optimizer_state: sharding/distributed_optimizer whole/resume whole/bugs_checkpoint
sharding/parallelize/: sharding/parallelize
sharding/parameter_groups: sharding/distributed_optimizer
sharding/stepped_piece: sharding/distributed_optimizer
trace/attributes: trace/export trace/record
trace/contents: plan/reads
trace/crossing: trace/every_tracer trace/symbolic
trace/export/: trace/export trace/every_tracer
trace/fake: trace/record trace/export
trace/export/symbolic_sizes: whole/lengths
trace/furthest: whole/bugs_refusals
trace/patching: trace/symbolic trace/export
trace/record/: trace/record trace/hidden_values trace/operations
trace/asking: whole/kept_whole
trace/keeping: whole/kept_whole
trace/regions: whole/kept_whole
trace/request: trace/every_tracer
trace/snapshot: trace/symbolic trace/export
trace/symbolic/: trace/symbolic
passes/analysis/blocks: plan/balance
passes/analysis/inner_gradients: whole/bugs_values
passes/analysis/lone_writes: passes/partition
passes/analysis/varying: whole/kept_whole
passes/erase_boundaries: plan/balance
passes/follow: plan/balance
passes/name_stages: passes/partition
passes/split: passes/partition trace/operations
"""
ROWS = {source: tests.split() for source, tests in (line.split(": ") for line in TABLE.strip().splitlines())}


def found(source: str) -> bool:
    """Whether a row tells where the tests of a file are, or a folder's."""
    return any(source == row or (row.endswith("/") and source.startswith(row)) for row in ROWS)


def test_every_source_file_has_its_tests_by_its_name_or_in_the_table() -> None:
    files = [*(ROOT / "fxpipe").glob("**/*.py"), *(ROOT / "passes").glob("**/*.py")]
    sources = {path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("fxpipe/") for path in files}
    sources = {source for source in sources if "__" not in source}
    named = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("**/test_*.py")}
    lost = sorted(source for source in sources if source.split("/")[-1] not in named and not found(source))
    assert lost == []
    gone = [row for row in ROWS if not any(source == row or source.startswith(row) for source in sources)]
    assert gone == [], "rows of files that are no more"


def test_what_the_table_names_is_there() -> None:
    paths = [Path("tests", test).parent / f"test_{Path(test).name}.py" for tests in ROWS.values() for test in tests]
    assert [str(path) for path in paths if not (ROOT / path).exists()] == []


def test_what_is_listed_as_slow_is_there() -> None:
    paths = [one.split("::") for one in (SLOW + LONGEST).split()]
    gone = [path for path, *name in paths if not (ROOT / "tests" / path).exists()]
    gone += [name[0] for path, *name in paths if name and f"def {name[0]}" not in (ROOT / "tests" / path).read_text()]
    assert gone == []
