"""The tests that go a whole path: one of each kind, at most 40, of up to 30 s of CPU each."""

WHOLE_PATHS = {
    # What a user does
    "tests/test_install.py::test_one_device_needs_no_extra",
    "tests/test_documentation.py::test_the_guides_run[docs/data.md]",
    "tests/test_examples.py::test_it_runs[custom_algorithm.py]",
    "tests/test_examples.py::test_it_runs[custom_reward.py]",
    "tests/runtime/watch/test_notebook.py::test_a_run_in_a_notebook",
    "tests/runtime/watch/report/test_page.py::test_the_command",
    "tests/test_gpu_kit.py::test_a_part_runs_on_a_cpu[first]",
    "tests/models/test_code.py::test_a_check_runs_the_code_and_is_for_it[own]",
    # Algorithms
    "tests/runtime/algorithms/test_sft.py::test_it_learns_its_demonstrations",
    "tests/runtime/algorithms/test_grpo.py::test_it_learns_and_finishes_a_run_directory",
    "tests/runtime/algorithms/test_dpo.py::test_it_learns_what_is_preferred[dpo]",
    "tests/runtime/algorithms/test_dpo.py::test_it_learns_what_is_preferred[kto]",
    "tests/runtime/algorithms/test_rm.py::test_it_learns_what_is_preferred[0]",
    "tests/runtime/algorithms/test_ppo.py::test_it_is_the_algorithm_of_its_paper[PPO]",
    "tests/runtime/algorithms/test_turns.py::"
    "test_segments_of_a_conversation_are_compared_together_and_computed_apart",
    "tests/runtime/run/test_asynchrony.py::"
    "test_each_step_trains_on_the_prompts_of_the_synchronous_run",
    "tests/rollout/test_admission.py::TestLoop::runTest",
    # What breaks
    "tests/runtime/run/test_resume.py::"
    "test_killed_between_two_steps_and_in_a_checkpoint"
    "[grpo with minibatches, a reference and dynamic sampling]",
    "tests/runtime/store/test_checkpoint.py::test_killed_at_any_point_of_writing[next]",
    "tests/runtime/run/test_live.py::test_ranks_that_die_cost_no_number[make0]",
    "tests/runtime/engines/test_faults.py::test_what_a_lost_replica_had_to_do_is_done_by_the_other",
    # Several devices
    "tests/losses/test_vocab_parallel.py::test_a_split_head_is_what_a_whole_one_gives",
    "tests/parallel/parity/test_parity.py::test_every_plan_gives_the_same_numbers[2 ranks]",
    "tests/parallel/test_checkpoint_reshard.py::test_any_plan_goes_on_from_any_other[alone]",
    "tests/parallel/megatron/test_backend.py::test_gradients_of_several_batches_add",
    "tests/parallel/megatron/test_engine.py::"
    "test_every_plan_gives_the_tokens_of_the_embedded_engine[tp]",
    "tests/parallel/megatron/test_overlap.py::test_overlap_changes_no_number[dp 2]",
    "tests/runtime/ranks/test_torchrun.py::test_the_others_obey_rank_zero",
    "tests/runtime/run/test_devices.py::test_a_cluster_is_asked_for_its_gpus",
    "tests/runtime/workers/test_environments.py::test_processes_change_nothing",
    "tests/test_emulated_gpu.py::test_a_run_equals_the_cpus",
    # vLLM
    "tests/rollout/test_generation_conformance.py::"
    "test_greedy_tokens_equal_transformers_generate[vllm-qwen2]",
    "tests/rollout/test_generation_conformance.py::"
    "test_a_seeded_request_does_not_depend_on_the_batch[vllm]",
    "tests/runtime/engines/test_weights.py::"
    "test_after_each_update_the_engine_is_the_new_model[qwen2-True-float32]",
    "tests/runtime/ranks/test_ranked_runs.py::test_vllm_beside_ranks[make0-dtensor-plan0]",
    # The core
    "tests/losses/test_compile.py::test_every_case_compiles_into_one_graph",
    "tests/parallel/test_proving.py::test_the_command_shows_what_holds_and_why_not",
    "tests/rollout/test_kv_cache.py::test_a_cache_that_grows_and_shrinks_keeps_its_contents",
    "tests/test_documentation.py::"
    "test_every_public_function_has_a_docstring_those_of_the_core_an_example",
    "tests/test_floors.py::test_public_names",
}
