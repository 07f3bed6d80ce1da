"""The internals of gspax that several test files use: where a module moves, this file changes.

A test takes them with `from api import make_mesh`, and public names from where a user has them. A module that at most
three test files use may be imported by those. Each name is imported when it is taken: a test of one file stays quick.
"""

from importlib import import_module

PLACES = {  # a module or a package -> its names, which may be modules
    "gspax": "http_client",
    "gspax.commands": "convert export main",
    "gspax.commands.export": "describe_generation",
    "gspax.evaluation": "checkpoint tasks",
    "gspax.evaluation.checkpoint": "evaluate evaluate_run evaluate_task find_tokenizer",
    "gspax.hf": "config_json names parameters peft tensors",
    "gspax.hf.config_json": "family_of read_config to_json",
    "gspax.hf.parameters": "named_shapes parameter_shapes read_params write_checkpoint",
    "gspax.hf.peft": "read_adapters write_adapters",
    "gspax.http_client": "BrokenError Client RefusedError UnreachableError",
    "gspax.learner": "adapters diagnostics metrics minibatches objective train_step updates",
    "gspax.learner.adapters": "abstract",
    "gspax.learner.diagnostics": "Readings changed_by_layer make_route router_confidence",
    "gspax.learner.forward": "Inputs OtherRows Scoring StepSettings Target forward head_logp",
    "gspax.learner.metrics": "changed_share expert_counts expert_load staleness_metrics",
    "gspax.learner.minibatches": "make_select",
    "gspax.learner.objective": "Outputs RoutingSettings UpdateConstants make_objective router_logp",
    "gspax.learner.optimizer": "learning_rate make_optimizer with_master",
    "gspax.learner.state": """
        TrainedPolicy abstract_adapters abstract_params abstract_state add_adapters applied_updates
        drop_frozen init_state load_adapters load_first load_model new_state restore_state save_start
    """,
    "gspax.learner.train_step": """
        Scores fill_old_logp interpolate_old_logp is_healthy make_score make_train_step make_update
        sum_over_replicas
    """,
    "gspax.learner.updates": "Steps adapt_range first_adapted make_steps noise_floor noise_warnings run_updates",
    "gspax.model": "decoding low_rank moe presets transformer",
    "gspax.model.decoding": "LayerCache Slots",
    "gspax.model.kernels": "expert_ffn quantization segments",
    "gspax.model.kernels.expert_ffn": "BLOCK BLOCKED Experts GELU_TANH RAGGED SQUARED_RELU sort_by_expert sort_keys",
    "gspax.model.kernels.quantization": "Quantized quantize",
    "gspax.model.low_rank": "combine dense is_low_rank partition",
    "gspax.model.moe": "Routing choose_experts scores_of",
    "gspax.model.passes": "Passes",
    "gspax.model.presets": "qwen3_0_6b tiny_moe",
    "gspax.model.sizes": """
        LOGIT_BUDGET USABLE active_parameter_count adapter_count choose_sampler_layout forward_flops
        inference_weights_bytes logit_chunk parameter_count resident_bytes sampler_bytes sampler_sizes
        trained_count
    """,
    "gspax.model.transformer": "head_params",
    "gspax.parallel": "multihost sharding",
    "gspax.parallel.sharding": """
        AXES RULES batch_shards find_mismatches make_mesh named_sharding reshape_mesh single_device_mesh
        spec
    """,
    "gspax.rollout": "episodes grading in_process",
    "gspax.rollout.completion": "Completion GradedTurns Samples Texts",
    "gspax.rollout.episodes": """
        Episode _take_step begin_conversation encode_demonstration encode_problem interact sample_conversations
    """,
    "gspax.rollout.grading": """
        Compared FailedRewardsError Started check_batch compute_advantages credit_turns reward_completions
        reward_metrics start_rewards
    """,
    "gspax.rollout.in_process": "InProcess",
    "gspax.rollout.problems": "FIRST Skipped read_usable",
    "gspax.rollout.runtime": "Runtime make_runtime",
    "gspax.rollout.servers": "server weights",
    "gspax.rollout.servers.server": "Answer CompletionRequest check_answer longest_answer read_experts",
    "gspax.rollout.servers.weights": "Writer Written",
    "gspax.run": "checkpoints directory folders interrupt manifest progress record",
    "gspax.run.checkpoints": "Checkpoints StoredArray newest_step open_array save take_traffic",
    "gspax.run.directory": "RunDir enter_run open_run",
    "gspax.run.folders": "append_line atomic_folder write_atomically",
    "gspax.run.interrupt": "Interrupted",
    "gspax.run.manifest": "MANIFEST find_damage finished_steps write_manifest",
    "gspax.run.progress": "PhaseBar",
    "gspax.run.record": "Recorder read_metrics read_rows to_line",
    "gspax.sampler": "placement sampler token_sampling",
    "gspax.sampler.inference_weights": "_summed_axes abstract_inference_weights copier make_inference_weights",
    "gspax.sampler.placement": "Sampler find_last_ahead make_meshes make_sampler",
    "gspax.sampler.sampler": "assemble lengths_to_host make_options pad_replies place_prompts sample split_groups",
    "gspax.sampler.state": "Prompts SampleOptions",
    "gspax.sampler.token_sampling": "sample_tokens",
    "gspax.tools": "benchmarks doctor",
    "gspax.tools.aot": "chips hlo programs",
    "gspax.tools.aot.hlo": "Collective UNKNOWN fetched_at traffic",
    "gspax.tools.aot.programs": "Compiled Memory Program compile_program device_bytes",
    "gspax.tools.benchmarks": "Limits table",
    "gspax.tools.doctor": "references",
    "gspax.training": "in_flight loop step warm_start",
    "gspax.training.first_policy": "FirstPolicy",
    "gspax.training.in_flight": "InFlight grade next_rollout receive start_rollout",
    "gspax.training.loop": "restore_or_start train",
    "gspax.training.step": "StepResult assign_advantages diagnostics_due prepare_minibatches run_step",
    "gspax.types": "Adapted Batch Rollout TrainState named_leaves segment_ids",
}
HOMES = {name: place for place, names in PLACES.items() for name in names.split()}


def __getattr__(name):
    if name not in HOMES:
        raise AttributeError(f"wanted a name of tests/api.py, got {name}")
    module = import_module(HOMES[name])
    return getattr(module, name) if hasattr(module, name) else import_module(f"{HOMES[name]}.{name}")
