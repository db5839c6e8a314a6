"""Every engine argument of vLLM, and what ROSE does with it; see ``vllm_options``."""

from __future__ import annotations

from tests.vllm_plugin.vllm_options import Options

ENGINE_ARGUMENTS: dict[str, Options] = {
    "EngineArgs": Options(
        passes="""
            model_weights served_model_name tokenizer hf_config_path convert skip_tokenizer_init
            tokenizer_mode trust_remote_code allowed_local_media_path allowed_media_domains download_dir
            safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
            config_format ir_op_priority
            distributed_executor_backend master_addr master_port nnodes node_rank
            distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes
            numa_bind_cpus device_ids dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size
            cp_kv_cache_interleave_size data_parallel_rank data_parallel_start_rank data_parallel_size_local
            data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
            data_parallel_multi_port_external_lb data_parallel_backend enable_hc_sp enable_expert_parallel
            enable_batch_sharded_sampling enable_ep_weight_filter moe_backend
            sparse_indexer_topk_backend all2all_backend enable_elastic_ep elastic_ep_max_dp_size
            ubatch_size dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold
            disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy
            _api_process_count _api_process_rank max_parallel_loading_workers disable_sliding_window
            disable_cascade_attn cpu_offload_params offload_num_in_group offload_prefetch_step
            offload_params gpu_memory_utilization kv_cache_memory_bytes max_num_queued_reqs
            max_num_queued_tokens max_logprobs enable_trace_replay disable_log_stats
            aggregate_engine_logging revision code_revision hf_token hf_overrides tokenizer_revision
            quantization_config allow_deprecated_quantization disable_custom_all_reduce
            enable_shm_tensor_arena language_model_only limit_mm_per_prompt enable_mm_embeds
            interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
            mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
            mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
            mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin
            renderer_num_workers skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
            mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize max_loras max_lora_rank
            default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules
            enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
            enable_moe_shared_loras max_lora_cls_labels ray_workers_use_nsight model_loader_extra_config
            ignore_patterns disable_chunked_mm_input reasoning_parser
            reasoning_parser_plugin spec_model spec_tokens show_hidden_metrics_for_version
            otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics
            kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing
            enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats
            pooler_config engram_config mamba_config kernel_config enable_flashinfer_autotune worker_cls
            worker_extension_cls profiler_config logging_config log_level log_config_file ec_manager_config
            reasoning_config generation_config sleep_mode_offload_cudagraph sleep_preserve_parameter_names
            enable_cumem_allocator enable_nccl_comm_suspend override_generation_config mamba_cache_dtype
            mamba_ssm_cache_dtype mamba_block_size prefix_match_unit mamba_cache_mode
            enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend
            mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
            use_tqdm_on_load pt_load_map_location swa_bounded_replay optimization_level performance_mode
            fault_tolerance_config enable_fault_tolerance kv_offloading_backend tokens_only shutdown_timeout
            fail_on_environ_validation gdn_prefill_backend kda_prefill_backend
            kda_decode_backend monokernel sleep_mode_backend watchdog_config
        """,
        served={
            "max_cudagraph_capture_size": "as the sizes",
            "cudagraph_capture_sizes": "graphs of steps with prompts, and Llama's layers, are vLLM's",
            "weight_transfer_config": "vLLM's layers unless checkpoints arrive",
            "enable_dbo": "vLLM's layers",
            "linear_backend": "vLLM's layers unless it is auto",
            "load_format": "vLLM's layers unless it is a checkpoint's",
            "quantization": "vLLM's layers, but for GPT-2",
            "model": "Rose's layers for GPT-2, Llama, Mistral, Qwen2, Qwen3; vLLM's for others",
            "return_sampling_mask": "vLLM's sampler draws",
            "runner": "decodes of models that generate are scheduled at once",
            "dtype": "float32, float16, bfloat16",
            "seed": "draws",
            "max_model_len": "one sequence must fit into the pool",
            "pipeline_parallel_size": "decodes are scheduled one by one",
            "tensor_parallel_size": "each rank has its heads",
            "data_parallel_size": "a cache per engine",
            "enable_prefix_caching": "as the rose option prefix_cache",
            "prefix_caching_hash_algo": "hashes of KV cache events; lookups hash for themselves",
            "max_num_scheduled_tokens": "above max_num_batched_tokens steps are not split",
            "long_prefill_token_threshold": "steps are not split",
            "long_prefill_token_threshold_adaptive": "with the threshold",
            "max_num_seqs": "rows of the block manager",
            "max_num_active_seqs": "rows that decode at once, too",
            "logprobs_mode": "processed ones are of the logits that Rose draws from",
            "use_fp64_gumbel": "vLLM's sampler draws",
            "model_class_overrides": "Rose's layers stay out",
            "enforce_eager": "no graphs of Rose's either",
            "enable_lora": "adapters share no blocks; steps are not split",
            "num_gpu_blocks_override": "one sequence must fit into the pool",
            "enable_chunked_prefill": "as the rose option chunked_prefill",
            "scheduler_reserve_full_isl": "counts blocks that hits leave to allocate",
            "prefill_schedule_interval": "decodes are scheduled one by one",
            "watermark": "steps are not split",
            "structured_outputs_config": "rows with a grammar decode with the others",
            "watermark_config": "vLLM's sampler draws",
            "enable_mfu_metrics": "decodes are scheduled one by one",
            "scheduling_policy": "steps are not split by priority",
            "compilation_config": "cudagraph_mode",
            "ec_transfer_config": "decodes are scheduled one by one",
            "enable_sleep_mode": "draws are not replayed from graphs",
            "model_impl": "Rose's layers in place of vLLM's own only",
            "attention_backend": "rose",
            "kv_cache_dtype_skip_layers": "layers of either type in one group",
            "additional_config": "key rose",
            "logits_processors": "before Rose's draws",
            "async_scheduling": "Rose's scheduler of the same kind",
            "stream_interval": "with joined outputs, too",
            "kv_offloading_size": "decodes are scheduled one by one",
            "enable_prompt_embeds": "blocks of embeddings are told by vLLM's hashes",
        },
        refused={
            "enable_return_routed_experts": "routed experts",
            "kv_cache_dtype": "this K/V cache type",
            "prefill_context_parallel_size": "prefill context parallelism",
            "decode_context_parallel_size": "decode context parallelism",
            "block_size": "--block-size",
            "prefix_cache_retention_interval": "prefix_cache_retention_interval",
            "offload_backend": "weight offloading",
            "cpu_offload_gb": "weight offloading",
            "offload_group_size": "weight offloading",
            "max_num_batched_tokens": "needs --max-num-batched-tokens",
            "aux_output_config": "routed experts",
            "speculative_config": "this kind of speculative decoding",
            "spec_method": "this kind of speculative decoding",
            "diffusion_config": "diffusion models",
            "kv_cache_metrics": "KV cache residency metrics",
            "scheduler_cls": "a scheduler of your own",
            "attention_config": "non-causal attention",
            "kv_transfer_config": "this KV connector",
            "kv_events_config": "a drafter that reads ahead",
            "kv_sharing_fast_prefill": "fast prefill",
            "disable_hybrid_kv_cache_manager": "separate KV cache groups for these sliding windows",
        },
    ),
    "AsyncEngineArgs": Options(passes="enable_log_requests"),
}
