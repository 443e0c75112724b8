"""Tests with FXPIPE_DEVICE=cuda: a folder or file in ``tests/`` a line, and behind it how its tests' names begin."""

from __future__ import annotations

FIRST = """
    distributed/
    run/
    sharding/
"""
"""What a run of the whole suite has there, but for slow ones. The others are long: ``-m long`` runs them."""

# Why what does not run.
NOT_ON_GPUS = {
    "what there is without an accelerator, or a number": """
        test_device.py ranks_have_the_same_settings_where_their_own_device_is_the_default
        test_device.py without_an_accelerator_every_device_keeps_its_name
        test_doctor.py a_part_that_fails_on_a_rank_names_itself_and_stops_no_other[nodes
        """,
    "needs no device": """
        schedules/
        test_docstrings.py
        test_imports.py
        test_public_surface.py
        test_torch_compat.py
        """,
    "chooses its devices itself": """
        loops/test_lightning.py
        simulated_gpu/
        whole/test_benchmarks.py
        """,
    "copies tensors of the CPU; whole/test_offload.py offloads on GPUs": """
        run/test_offload.py
        """,
    "on a GPU all that the device has allocated counts, of which one test is": """
        run/test_measured_memory.py each_rank_holds the_measured_peak zero_3_keeps what_a_hook_has
        """,
    "on a GPU no receive is posted early": """
        run/test_wire_exchange.py a_receive_takes_small_ones_behind_it_along[3
        """,
    "the memory of the host is measured": """
        parameters/test_materialise.py a_rank_needs_little_more_memory_than_what_it_holds
        """,
    "on a GPU writes by .data are found in the first step alone": """
        run/test_recompute.py a_stage_that_does_more_than_compute_does_it_once[unseen,
        """,
}

NOT_ON_SIMULATED_GPUS = {
    "where a stream waits for another rank, the host of a simulated GPU waits, too, and hears no signal": """
        distributed/test_watchdog.py a_message_is_called_by_what_makes_it
        distributed/test_watchdog.py what_ranks_do_or_were_given_differently_is_told_to_both[step
        distributed/test_watchdog.py a_waiting_rank_hears_ctrl_c
        """,
    "a step that failed lets go of buffers whose messages it aborts, and the simulated NCCL still has them": """
        run/test_notes.py an_error_keeps_its_type_and_bears_a_note[distributed
        test_doctor.py a_part_that_fails_on_a_rank_names_itself_and_stops_no_other[links
        whole/test_refusals.py after_a_step_has_failed_the_next_call_says_so
        """,
    "times of a simulated GPU are virtual, apart from the host's; other tests have them to the bit": """
        run/test_measured_timeline.py a_failed_step_leaves a_measured_stage_costs
        run/test_measured_timeline.py a_recorded_step_is_a_timeline_of_its_schedule_on_every_rank[distributed
        run/test_measured_timeline.py each_replica_tells ranks_whose_clocks_differ the_categories_of_a_step
        sharding/test_data_axis.py reductions_start_while_backward_goes_on
        """,
    "the user's line of a collective is that of what simulates it": """
        whole/test_gathered.py a_collective_that_waits_for_other_stages_is_refused_at_capture
        """,
    "it has no CTC loss": """
        whole/test_hf_batches.py a_model_that_looks_at_values_trains_without_a_rule
        """,
    "there is no Triton, which Inductor needs": """
        plan/test_joint_graph.py inductor_compiles_the_three_parts
        """,
    "attention on a simulated GPU is its plain formula, whose backward has four products": """
        search/test_node_costs.py attention_counts_its_two_products_and_five_in_backward
        """,
    "a process that is spawned imports torch before it imports what simulates a GPU": """
        distributed/test_launch.py launch_returns_the_results_by_rank
        """,
    "no other process can be given memory of a simulated GPU": """
        run/test_detached.py what_is_made_from_it_is_a_plain_tensor[fork]
        """,
}


def beginnings(table: str) -> tuple[str, ...]:
    """How the ids of a table's tests begin."""
    rows = [line.split() for line in table.strip().splitlines()]
    return tuple(f"tests/{file}{f'::test_{name}' * bool(name)}" for file, *names in rows for name in names or [""])


def reason(nodeid: str, simulated: bool) -> str:
    """Why that test does not run; an empty string where it does."""
    for why, names in (NOT_ON_GPUS | (NOT_ON_SIMULATED_GPUS if simulated else {})).items():
        if nodeid.startswith(beginnings(names)):
            return why
    return ""
