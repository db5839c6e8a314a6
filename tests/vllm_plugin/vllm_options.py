"""Every option of vLLM's configuration, and what ROSE does with it; engine arguments are in ``vllm_engine_arguments``.

Options of Rose's own are in ``rose_backend.config``. The list is that of all releases that ``registration`` allows;
``test_vllm_options.py`` compares it with the vLLM that is installed, and tries every refusal.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one of vLLM's classes."""

    passes: str = ""
    """Names of those that are vLLM's own business: it acts on them, or refuses them itself, with ROSE as without. Those
    of other attention backends and of kinds of models that ROSE refuses do nothing here."""
    served: dict[str, str] = field(default_factory=dict)
    """Name -> what to know, of those that Rose's parts act on in vLLM's place, as vLLM means them."""
    refused: dict[str, str] = field(default_factory=dict)
    """Name -> words of the error at start-up, of those with values that Rose's parts cannot serve."""

    def names(self) -> list[str]:
        """Return all names."""
        return [*self.passes.split(), *self.served, *self.refused]


ONLY_IN = {
    "0.33": """
        AttentionConfig.indexer_tp_shard_min_rows AttentionConfig.minimax_m3_indexer_cp
        AttentionConfig.trtllm_ragged_backend CacheConfig.simple_cpu_offload_num_blocks
        EngineArgs.monokernel EngineArgs.sleep_mode_backend EngineArgs.watchdog_config
        KernelConfig.monokernel SpeculativeConfig.disable_lookahead_block_hashes
        SpeculativeConfig.draft_lm_head_quantization SpeculativeConfig.fly_entropy_threshold
        SpeculativeConfig.fly_entropy_top_k SpeculativeConfig.fly_window_size SpeculativeConfig.xpress_topc
        VllmConfig.watchdog_config WatchdogConfig.check_interval WatchdogConfig.dump_dir
        WatchdogConfig.timeout
    """
}
"""Release -> the options that no other supported release has."""

CONFIGURATION: dict[str, Options] = {
    "VllmConfig": Options(
        passes="""
            model_config cache_config parallel_config scheduler_config device_config load_config
            offload_config attention_config aux_output_config engram_config mamba_config kernel_config
            speculative_config structured_outputs_config observability_config logging_config quant_config
            compilation_config profiler_config kv_transfer_config kv_events_config ec_manager_config
            reasoning_config instance_id optimization_level performance_mode weight_transfer_config
            shutdown_timeout watchdog_config
        """,
        served={
            "lora_config": "adapters share no blocks; steps are not split",
            "watermark_config": "vLLM's sampler draws",
            "ec_transfer_config": "decodes are scheduled one by one",
            "additional_config": "key rose",
        },
        refused={
            "diffusion_config": "diffusion models",
        },
    ),
    "ModelConfig": Options(
        passes="""
            model model_weights convert tokenizer tokenizer_mode trust_remote_code hf_config hf_text_config
            is_submodel_config word_embeddings_untied_by_checkpoint hf_config_path allowed_local_media_path
            allowed_media_domains revision code_revision tokenizer_revision spec_target_max_model_len
            quantization_config allow_deprecated_quantization max_logprobs enable_trace_replay
            disable_sliding_window disable_cascade_attn skip_tokenizer_init served_model_name config_format
            hf_token hf_overrides generation_config override_generation_config
            sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph
            enable_nccl_comm_suspend enable_cumem_allocator io_processor_plugin renderer_num_workers
            pooler_config multimodal_config
        """,
        served={
            "quantization": "vLLM's layers, but for GPT-2",
            "runner": "decodes of models that generate are scheduled at once",
            "dtype": "float32, float16, bfloat16",
            "seed": "draws",
            "max_model_len": "one sequence must fit into the pool",
            "enforce_eager": "no graphs of Rose's either",
            "return_sampling_mask": "vLLM's sampler draws",
            "logprobs_mode": "processed ones are of the logits that Rose draws from",
            "use_fp64_gumbel": "vLLM's sampler draws",
            "model_class_overrides": "Rose's layers stay out",
            "enable_sleep_mode": "draws are not replayed from graphs",
            "model_impl": "Rose's layers in place of vLLM's own only",
            "logits_processors": "before Rose's draws",
            "enable_prompt_embeds": "blocks of embeddings are told by vLLM's hashes",
        },
    ),
    "QuantizationConfigArgs": Options(passes="linear moe ignore targets"),
    "QuantSpec": Options(passes="weight activation"),
    "PoolerConfig": Options(
        passes="""
            task pooling_type seq_pooling_type tok_pooling_type use_activation enable_flash_late_interaction
            dimensions enable_chunked_processing max_embed_len logit_mean logit_sigma step_tag_id
            returned_token_ids
        """,
    ),
    "MultiModalConfig": Options(
        passes="""
            language_model_only limit_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs
            mm_device_do_normalize mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm
            mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
            mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
            mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling video_pruning_rate
            video_pruning_method mm_tensor_ipc allow_missing_mm_embeddings mm_ipc_gpu_memory_gb
        """,
    ),
    "CacheConfig": Options(
        passes="""
            user_specified_block_size prefix_match_unit gpu_memory_utilization is_attention_free
            sliding_window mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_dtype
            mamba_ssm_cache_dtype mamba_cache_mode enable_mamba_shared_prefix_checkpoint
            replayssm_buffer_len use_replayssm use_kda_recoverssm num_gpu_blocks num_cpu_blocks
            effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency hash_block_size
            cache_hit_alignment_tokens swa_bounded_replay kv_cache_memory_bytes kv_offloading_backend
            _block_size_resolved simple_cpu_offload_num_blocks
        """,
        served={
            "kv_offloading_size": "decodes are scheduled one by one",
            "kv_cache_layout": "any: kernels go by strides",
            "num_gpu_blocks_override": "one sequence must fit into the pool",
            "enable_prefix_caching": "as the rose option prefix_cache",
            "prefix_caching_hash_algo": "hashes of KV cache events; lookups hash for themselves",
            "kv_cache_dtype_skip_layers": "layers of either type in one group",
        },
        refused={
            "block_size": "--block-size",
            "cache_dtype": "this K/V cache type",
            "prefix_cache_retention_interval": "prefix_cache_retention_interval",
            "kv_sharing_fast_prefill": "fast prefill",
        },
    ),
    "ParallelConfig": Options(
        passes="""
            data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_master_ip
            data_parallel_rpc_port dp_sync_interval data_parallel_master_port data_parallel_backend
            data_parallel_external_lb data_parallel_hybrid_lb enable_hc_sp enable_expert_parallel
            enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb eplb_config
            expert_placement_strategy all2all_backend max_parallel_loading_workers disable_custom_all_reduce
            enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size ubatch_size
            dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization
            ray_workers_use_nsight ray_runtime_env placement_group distributed_executor_backend worker_cls
            worker_extension_cls master_addr master_port node_rank nnodes numa_bind numa_bind_nodes
            numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds
            cpu_distributed_timeout_seconds world_size rank _data_parallel_master_port_list
            _coord_store_port dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate
            cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size data_parallel_index
            _api_process_count _api_process_rank enable_fault_tolerance fault_tolerance_config
        """,
        served={
            "enable_dbo": "vLLM's layers",
            "pipeline_parallel_size": "decodes are scheduled one by one",
            "tensor_parallel_size": "each rank has its heads",
            "data_parallel_size": "a cache per engine",
            "is_moe_model": "decides who counts prefill intervals",
        },
        refused={
            "prefill_context_parallel_size": "prefill context parallelism",
            "decode_context_parallel_size": "decode context parallelism",
        },
    ),
    "EPLBConfig": Options(
        passes="""
            window_size step_interval num_redundant_experts log_balancedness log_balancedness_interval
            use_async policy communicator enable_migration_batching
        """,
    ),
    "FaultToleranceConfig": Options(passes="engine_recovery_timeout_sec"),
    "SchedulerConfig": Options(
        passes="""
            runner_type max_num_queued_reqs max_num_queued_tokens is_multimodal_model
            max_num_encoder_input_tokens encoder_cache_size disable_chunked_mm_input
        """,
        served={
            "max_num_scheduled_tokens": "above max_num_batched_tokens steps are not split",
            "max_num_seqs": "rows of the block manager",
            "max_num_active_seqs": "rows that decode at once, too",
            "long_prefill_token_threshold": "steps are not split",
            "long_prefill_token_threshold_adaptive": "with the threshold",
            "enable_chunked_prefill": "as the rose option chunked_prefill",
            "policy": "steps are not split by priority",
            "scheduler_reserve_full_isl": "counts blocks that hits leave to allocate",
            "watermark": "steps are not split",
            "prefill_schedule_interval": "decodes are scheduled one by one",
            "async_scheduling": "Rose's scheduler of the same kind",
            "stream_interval": "with joined outputs, too",
        },
        refused={
            "max_num_batched_tokens": "needs --max-num-batched-tokens",
            "scheduler_cls": "a scheduler of your own",
            "disable_hybrid_kv_cache_manager": "separate KV cache groups for these sliding windows",
        },
    ),
    "DeviceConfig": Options(passes="device device_type"),
    "LoadConfig": Options(
        passes="""
            download_dir safetensors_load_strategy safetensors_prefetch_num_threads
            safetensors_prefetch_block_size model_loader_extra_config device ignore_patterns
            use_tqdm_on_load pt_load_map_location
        """,
        served={
            "load_format": "vLLM's layers unless it is a checkpoint's",
        },
    ),
    "OffloadConfig": Options(
        passes="uva prefetch",
        refused={
            "offload_backend": "weight offloading",
        },
    ),
    "UVAOffloadConfig": Options(
        passes="cpu_offload_params",
        refused={
            "cpu_offload_gb": "weight offloading",
        },
    ),
    "PrefetchOffloadConfig": Options(
        passes="offload_num_in_group offload_prefetch_step offload_params",
        refused={
            "offload_group_size": "weight offloading",
        },
    ),
    "AttentionConfig": Options(
        passes="""
            minimax_m3_msa_decode_backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph
            tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_trtllm_attention
            disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization
            indexer_kv_dtype indexer_sparse_logits hisparse_config sparse_mla_force_mqa
            sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
            flex_attn_kv_block_size trtllm_ragged_backend indexer_tp_shard_min_rows minimax_m3_indexer_cp
        """,
        served={
            "backend": "ROSE",
            "backend_per_kind": "ROSE for some kinds of layers",
        },
        refused={
            "use_non_causal": "non-causal attention",
        },
    ),
    "HiSparseConfig": Options(passes="device_buffer_size eager_host_mirror"),
    "AuxOutputConfig": Options(
        passes="max_bytes",
        refused={
            "enable_return_routed_experts": "routed experts",
        },
    ),
    "EngramConfig": Options(passes="cpu_offload embedding_across_dp dp_shared_memory use_thp"),
    "MambaConfig": Options(
        passes="backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm"
    ),
    "KernelConfig": Options(
        passes="""
            ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
            enable_cutedsl_warmup enable_jit_warmup moe_backend sparse_indexer_topk_backend
            linear_backend_per_quant monokernel
        """,
        served={"linear_backend": "vLLM's layers unless it is auto"},
    ),
    "IrOpPriorityConfig": Options(passes="rms_norm fused_add_rms_norm gelu_and_mul_sparse"),
    "LoRAConfig": Options(
        passes="""
            max_lora_rank max_loras fully_sharded_loras max_cpu_loras lora_dtype target_modules
            default_mm_loras enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
            enable_moe_shared_loras max_lora_cls_labels
        """,
    ),
    "SpeculativeConfig": Options(
        passes="""
            enforce_eager model draft_tensor_parallel_size tensor_parallel_size quantization moe_backend
            attention_backend kv_cache_dtype max_model_len revision code_revision
            index_share_for_mtp_iteration disable_padded_drafter_batch use_local_argmax_reduction
            use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting
            target_model_config target_parallel_config num_speculative_tokens_per_batch_size
            draft_model_config draft_parallel_config suffix_decoding_max_tree_depth
            suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
            suffix_decoding_min_token_prob draft_load_config rejection_sample_method
            synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification
            draft_sample_method dspark_draft_topk disable_lookahead_block_hashes draft_lm_head_quantization
            xpress_topc fly_window_size fly_entropy_threshold fly_entropy_top_k
        """,
        served={
            "num_speculative_tokens": "up to 7 in CUDA graphs",
        },
        refused={
            "method": "this kind of speculative decoding",
            "disable_eagle_block_drop": "disable_eagle_block_drop",
        },
    ),
    "WatermarkConfig": Options(
        passes="""
            key algorithm alpha context_width deduplicate_contexts deduplicate_contexts_max_history prf
            allow_target_only_watermarking
        """,
    ),
    "DiffusionConfig": Options(passes="canvas_length max_denoising_steps"),
    "StructuredOutputsConfig": Options(
        passes="""
            backend disable_any_whitespace disable_additional_properties reasoning_parser
            reasoning_parser_plugin enable_in_reasoning
        """,
    ),
    "ObservabilityConfig": Options(
        passes="""
            show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
            per_request_spec_decode_metrics kv_cache_metrics_sample custom_histogram_buckets
            cudagraph_metrics enable_layerwise_nvtx_tracing enable_mm_processor_stats
            enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose
        """,
        served={
            "enable_mfu_metrics": "decodes are scheduled one by one",
        },
        refused={
            "kv_cache_metrics": "KV cache residency metrics",
        },
    ),
    "LoggingConfig": Options(passes="log_level formatter configure_logging pylogging_config_file"),
    "CompilationConfig": Options(
        passes="""
            debug_dump_path cache_dir compile_cache_save_format backend custom_ops ir_enable_torch_wrap
            splitting_ops compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_token_budgets
            encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch
            cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold
            compile_sizes compile_ranges_endpoints inductor_compile_config inductor_passes
            cudagraph_num_of_warmups cudagraph_copy_inputs cudagraph_specialize_lora
            use_inductor_graph_partition pass_config dynamic_shapes_config
            local_cache_dir fast_moe_cold_start enabled_custom_ops disabled_custom_ops traced_files
            compilation_time encoder_compilation_time static_forward_context static_all_moe_layers
        """,
        served={
            "max_cudagraph_capture_size": "as the sizes",
            "cudagraph_capture_sizes": "graphs of steps with prompts, and Llama's layers, are vLLM's",
            "mode": "NONE with Rose's layers but GPT-2's",
            "cudagraph_mode": "as the rose option cuda_graph",
        },
    ),
    "PassConfig": Options(
        passes="""
            fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms
            enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm
            fuse_rope_kvcache fuse_qk_norm_rope_kvcache rope_kvcache_fusion_max_token_num
            fi_allreduce_fusion_max_size_mb
        """,
    ),
    "DynamicShapesConfig": Options(passes="type evaluate_guards assume_32_bit_indexing"),
    "ProfilerConfig": Options(
        passes="""
            profiler torch_profiler_dir torch_profiler_activities proton_profiler_dir proton_context
            proton_data proton_backend proton_mode proton_hook proton_output_format proton_graph_attribution
            torch_profiler_with_stack torch_profiler_with_flops torch_profiler_use_gzip
            torch_profiler_dump_cuda_time_total torch_profiler_record_shapes torch_profiler_with_memory
            capture_torch_profiler detailed_trace_annotation ignore_frontend delay_iterations max_iterations
            warmup_iterations active_iterations wait_iterations
        """,
    ),
    "KVTransferConfig": Options(
        passes="""
            engine_id kv_buffer_device kv_role kv_port enable_permute_local_kv kv_load_failure_policy
        """,
        refused={
            "kv_connector": "this KV connector",
            "kv_connector_extra_config": "LMCache's lazy offload",
            "kv_connector_module_path": "a KV connector of your own",
        },
    ),
    "KVEventsConfig": Options(
        passes="publisher endpoint replay_endpoint buffer_steps hwm max_queue_size topic",
        refused={
            "enable_kv_cache_events": "a drafter that reads ahead",
        },
    ),
    "ECTransferConfig": Options(
        passes="""
            engine_id ec_buffer_device ec_buffer_size ec_role ec_ip ec_port ec_connector_extra_config
            ec_connector_module_path mm_encoder_output_widths
        """,
        served={
            "ec_connector": "decodes are scheduled one by one",
        },
    ),
    "EncoderCacheManagerConfig": Options(passes="encoder_cache_manager_cls manager_config"),
    "ReasoningConfig": Options(
        passes="""
            reasoning_parser reasoning_start_str reasoning_end_str _reasoning_start_token_ids
            _reasoning_end_token_ids _natural_reasoning_end_token_ids _enabled
        """,
    ),
    "WeightTransferConfig": Options(served={"backend": "vLLM's layers unless checkpoints arrive"}),
    "WatchdogConfig": Options(passes="timeout check_interval dump_dir"),
}
