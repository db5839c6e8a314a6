"""``rose serve --replicas``: several engines behind one server, as a Ray Serve application with one replica per GPU.

The process that serves HTTP then has no engine. Its ``ReplicatedEngine`` tokenizes each prompt and passes it
to Ray Serve, whose ``PrefixRouter`` (``prefix_routing.py``) chooses the ``EngineReplica`` that computes it. Ray Serve
monitors replicas, replaces those that die, and drains those that it stops.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeAlias

# Ray reports usage statistics to its maintainers unless told otherwise. It reads this variable on import.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from rose_backend import errors
from rose_backend.config import EngineConfig
from rose_backend.engine.client import EngineClient, OutputStream
from rose_backend.engine.messages import PromptPiece, Ready, Update
from rose_backend.engine.outputs import Counters, EngineLoad, EngineStats
from rose_backend.engine.process_settings import LOG_FORMAT, begin_serving, end_serving
from rose_backend.engine.remote_engine import MAX_UNREAD_BYTES, RemoteEngine, num_waiting_bytes
from rose_backend.engine.request import LoRARequest, ProcessedInput
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.engine.tokenizer_loading import load_tokenizer
from rose_backend.errors import ConfigError, EngineDeadError, RequestError
from rose_backend.models.weights import resolve_model_path
from rose_backend.server.prefix_routing import PrefixRouter

logger = logging.getLogger(__name__)

DEPLOYMENT_NAME = "engine"
_HEALTH_CHECK_S = 2.0
"""Time between Ray Serve's health checks of a replica."""
_STATUS_S = 1.0
"""Time between the server's queries for the number of running replicas."""
_REMOTE_TIMEOUT_S = 1.0
"""How long a request for metrics waits for the replicas' current counters."""
_OBJECT_STORE_BYTES = 128 << 20
"""Size of Ray's object store if this server starts Ray. Prompts and outputs are small and do not go through it."""
_PIECE_BYTES = 1 << 18
"""Size of a message with log-probabilities of prompt tokens."""

Message: TypeAlias = "Update | PromptPiece | RequestError"
"""What a replica yields for a prompt; an error ends the answer."""


class EngineReplica:
    """One engine in a Ray actor. The actor exits when its engine has died, and Ray Serve starts another."""

    def __init__(self, config: EngineConfig, directory: str, log_level: int) -> None:
        # Paths in the options may be relative to the server's directory, which another machine may not have.
        with suppress(OSError):
            os.chdir(directory)
        logging.basicConfig(format=LOG_FORMAT, stream=sys.stderr)
        logging.getLogger("rose_backend").setLevel(log_level)
        self._engine = RemoteEngine(config, lambda tokenizer: None)
        self._start: asyncio.Task[None] | None = None
        # The load of each adapter, running or finished, by its id.
        self._adapters: dict[int, asyncio.Task[None]] = {}

    async def ready(self) -> Ready:
        """Return what ``ReplicatedEngine`` has to know about the engine."""
        engine, processor = self._engine, self._engine.input_processor
        counters = await self._engine.counters()
        options = dataclasses.asdict(engine.config)
        return Ready(
            options,
            processor.vocab_size,
            processor.max_model_len,
            engine.num_blocks,
            counters,
            processor.eos_token_ids,
        )

    async def generate(
        self, request_id: str, lora: LoRARequest | None, *, prompt: ProcessedInput
    ) -> AsyncIterator[Message]:
        """Yield what is new in the answer to a prompt, until it is finished or refused.

        Args:
            lora: the prompt's adapter, which this replica loads if it has not.
        """
        has_sent_prompt = False
        try:
            await self._started()
            if lora is not None:
                await self.load_adapter(lora)
            async with aclosing(self._engine.generate_deltas(prompt, request_id=request_id)) as outputs:
                async for output in outputs:
                    if output.prompt_logprobs is not None and not has_sent_prompt:
                        has_sent_prompt = True
                        for first, words in output.prompt_logprobs.pieces(_PIECE_BYTES):
                            yield PromptPiece.of(request_id, first, words)
                    yield Update.of(output)
        except RequestError as error:
            yield error
        except EngineDeadError:
            # The engine's log has the reason. When the actor exits, all its callers get an error at once, and Ray Serve
            # routes no more prompts to it.
            logger.error("this replica ends, as its engine has")
            os._exit(1)

    async def abort(self, request_id: str) -> bool:
        """Do what ``EngineClient.abort`` does."""
        return await self._engine.abort(request_id)

    async def counters(self) -> tuple[str, Counters]:
        """Return the replica's name, and its engine's counters."""
        await self._started()
        return serve.get_replica_context().replica_id.unique_id, await self._engine.counters()

    async def load_adapter(self, lora: LoRARequest) -> None:
        """Load an adapter unless it is loaded.

        Raises:
            RequestError: see ``AdapterTable.load``.
        """
        await self._started()
        lora_id = lora.lora_int_id
        if lora_id not in self._adapters:
            self._adapters[lora_id] = asyncio.ensure_future(self._engine.load_adapter(lora))
        try:
            await asyncio.shield(self._adapters[lora_id])
        except RequestError:
            self._adapters.pop(lora_id, None)
            raise

    async def unload_adapter(self, lora_id: int) -> None:
        """Do what ``EngineClient.unload_adapter`` does."""
        loading = self._adapters.pop(lora_id, None)
        if loading is not None:
            # The engine must get the unload after it has finished the load.
            with suppress(RequestError):
                await asyncio.shield(loading)
                self._engine.unload_adapter(lora_id)

    async def check_health(self) -> None:
        """Tell Ray Serve, by an error, that this replica has to be replaced."""
        await self._started()
        if not self._engine.is_running or self._engine.is_stalled:
            raise RuntimeError("the engine does not run, or does not answer")

    async def __del__(self) -> None:
        """Stop; Ray Serve calls this when requests have ended, and after an error of the constructor."""
        if hasattr(self, "_engine"):
            await self._engine.shutdown()

    async def _started(self) -> None:
        """Start the engine in this event loop, once; the constructor runs before there is one."""
        if self._start is None:
            self._start = asyncio.ensure_future(self._engine.start())
        await asyncio.shield(self._start)


class ReplicatedEngine(EngineClient):
    """All replicas as one engine, for one event loop.

    The constructor starts Ray, unless RAY_ADDRESS names a running cluster, and blocks until the replicas have loaded
    the model. ``start`` has to be awaited on the event loop that will serve.

    Args:
        replicas: how many, or fields of Ray Serve's ``AutoscalingConfig``.
        drain_timeout_s: time that a replica gets to finish its requests when Ray Serve stops it.
        use_tokenizer: see ``RemoteEngine``.

    Raises:
        ConfigError: the options do not fit the model or the machine, or there are too few GPUs.
        ModelError: the model cannot be loaded.
        EngineDeadError: a replica ended while it was loading.
    """

    def __init__(
        self,
        config: EngineConfig,
        replicas: int | Mapping[str, Any],
        drain_timeout_s: float,
        use_tokenizer: Callable[[Tokenizer], None],
    ) -> None:
        # Before Ray is started, so that a mistake is reported at once.
        scaling = _scaling_options(replicas)
        tokenizer = Tokenizer(load_tokenizer(resolve_model_path(config.model)))
        use_tokenizer(tokenizer)
        resources = _start_ray(config, scaling)
        self._app_name = f"rose-{secrets.token_hex(4)}"
        try:
            serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
            deployment = serve.deployment(EngineReplica).options(
                name=DEPLOYMENT_NAME,
                ray_actor_options=resources,
                # One more than the engine takes: it refuses the excess itself, with an error that clients know.
                max_ongoing_requests=config.max_num_seqs + config.max_queue_size + 1,
                request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
                health_check_period_s=_HEALTH_CHECK_S,
                graceful_shutdown_timeout_s=drain_timeout_s,
                graceful_shutdown_wait_loop_s=0.2,
                max_constructor_retry_count=1,
                logging_config={"log_level": "WARNING", "enable_access_log": False},
                **scaling,
            )
            log_level = logging.getLogger("rose_backend").getEffectiveLevel()
            handle = _run(deployment.bind(config, os.getcwd(), log_level), self._app_name)
            ready: Ready = handle.ready.remote().result()
        except BaseException:
            _stop(self._app_name)
            raise
        super().__init__(threading.Condition())
        self.config = EngineConfig(**ready.options)
        self.num_blocks = ready.num_blocks
        """Of each replica."""
        self.input_processor = ready.input_processor(tokenizer)
        self._handle = handle
        self._generate = handle.options(method_name="generate", stream=True, _by_reference=False)
        # The latest counters of each replica. Those of dead replicas are kept, so that sums never decrease.
        self._counters: dict[str, Counters] = {}
        self._loads = [ready.counters.load]
        self._num_running_replicas = 0
        self._adapters: dict[int, LoRARequest] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background_tasks: set[asyncio.Task[Any]] = set()
        # Size of the prompts that no replica has begun to answer.
        self._num_waiting_bytes = 0
        self._has_room = asyncio.Event()

    async def start(self) -> None:
        """Serve requests of the running event loop."""
        self._start_task(self._watch_replicas())
        begin_serving()

    async def wait_for_room(self) -> None:
        """Do what ``EngineClient.wait_for_room`` does."""
        self._check_running()
        while self._num_waiting_bytes > MAX_UNREAD_BYTES:
            self._has_room.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_room.wait(), _STATUS_S)
            self._check_running()

    async def counters(self) -> Counters:
        """Return the sums over all replicas, except that KV cache usage is a mean."""
        answers = await self._tell_all("counters", timeout_s=_REMOTE_TIMEOUT_S)
        present = dict(each for each in answers if not isinstance(each, BaseException))
        if present:
            self._counters |= present
            self._loads = [each.load for each in present.values()]
        return _sum_counters(self._counters.values(), self._loads)

    async def load_adapter(self, lora: LoRARequest) -> None:
        """Load an adapter in all replicas; one that starts later loads it with its first prompt.

        Raises:
            RequestError: a replica cannot load it; no other keeps it.
            EngineDeadError: no replica has answered.
        """
        self._check_running()
        answers = await self._tell_all("load_adapter", lora)
        for answer in answers:
            if isinstance(answer, RequestError):
                self.unload_adapter(lora.lora_int_id)
                raise answer
        # A single failure may be a dying replica: its replacement loads the adapter with its first prompt.
        if all(isinstance(answer, BaseException) for answer in answers):
            raise EngineDeadError("no replica has loaded the adapter")
        self._adapters[lora.lora_int_id] = lora

    def unload_adapter(self, lora_id: int) -> None:
        """Do what ``EngineClient.unload_adapter`` does."""
        self._adapters.pop(lora_id, None)
        self._start_task(self._tell_all("unload_adapter", lora_id))

    async def shutdown(self) -> None:
        """Do what ``EngineClient.shutdown`` does."""
        if not self._is_stopping:
            self._is_stopping = True
            end_serving()
            for task in (*self._tasks.values(), *self._background_tasks):
                task.cancel()
            for stream in self._take_all():
                stream.put(EngineDeadError("the engine was shut down"))
            await asyncio.to_thread(_stop, self._app_name)

    def _submit(self, prompt: ProcessedInput, stream: OutputStream) -> None:
        self._register(stream)
        stream.prompt, stream.prompt_token_ids = prompt.prompt, prompt.token_ids.tolist()
        stream.prompt_logprobs = self.input_processor.make_prompt_logprobs(prompt)
        task = asyncio.create_task(self._answer(prompt, stream))
        self._tasks[stream.request_id] = task
        task.add_done_callback(lambda _: self._forget(stream))

    def _end(self, stream: OutputStream) -> None:
        self._start_task(self._tell_all("abort", stream.request_id))

    def _abandon(self, stream: OutputStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            self._tasks[stream.request_id].cancel()

    def _forget(self, stream: OutputStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id], self._tasks[stream.request_id]

    async def _answer(self, prompt: ProcessedInput, stream: OutputStream) -> None:
        """Have a replica compute the answer to a prompt, and forward it to the stream."""
        lora, is_over, response = self._adapters.get(prompt.lora_id), False, None
        num_bytes = num_waiting_bytes(prompt)
        self._num_waiting_bytes += num_bytes
        try:
            response = self._generate.remote(stream.request_id, lora, prompt=prompt._replace(prompt=None))
            async for message in response:
                self._make_room(num_bytes)
                num_bytes = 0
                if isinstance(message, RequestError):
                    is_over = True
                    stream.put(message)
                elif not isinstance(message, PromptPiece):
                    is_over = message.finished
                    texts = stream.prompt, stream.prompt_token_ids, stream.prompt_logprobs
                    stream.put(message.output(*texts))
                elif stream.prompt_logprobs is not None:
                    stream.prompt_logprobs.write(message.first, message.words())
        except asyncio.CancelledError:
            if response is not None:
                response.cancel()
            raise
        except Exception as error:
            # From Ray: the replica has died, is unreachable, or has raised an unexpected error.
            logger.error("request %s lost its replica: %s", stream.request_id, _first_line(error))
        finally:
            self._make_room(num_bytes)
        if not is_over:
            stream.put(EngineDeadError("the replica that worked on the request has ended or failed"))

    def _make_room(self, num_bytes: int) -> None:
        self._num_waiting_bytes -= num_bytes
        self._has_room.set()

    async def _watch_replicas(self) -> None:
        """Keep ``is_stalled`` up to date: true while no replica runs."""
        while True:
            try:
                status = await asyncio.to_thread(serve.status)
                states = status.applications[self._app_name].deployments[DEPLOYMENT_NAME].replica_states
                num_running = states.get("RUNNING", 0)
                if num_running != self._num_running_replicas:
                    logger.info("replicas that run: %d", num_running)
                self._num_running_replicas, self.is_stalled = num_running, num_running == 0
            except Exception as error:
                logger.warning("Ray Serve does not say how many replicas run: %s", _first_line(error))
            await asyncio.sleep(_STATUS_S)

    async def _tell_all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of all replicas and return their answers, errors among them; none if one is late."""
        try:
            answers = self._handle.broadcast(method, *arguments)
            return await answers.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError):
            return []

    def _start_task(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        # The event loop keeps only weak references to tasks.
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)


def _scaling_options(replicas: int | Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of replicas as options of a Ray Serve deployment.

    Raises:
        ConfigError: Ray Serve knows no such field, or does not allow its value.
    """
    if isinstance(replicas, int):
        return {"num_replicas": replicas}
    for name in replicas:
        if name not in AutoscalingConfig.model_fields:
            hint = errors.nearest_name_hint(name, AutoscalingConfig.model_fields)
            raise ConfigError(
                f"replicas: got the field {name!r}, which Ray Serve's AutoscalingConfig lacks{hint}"
            )
    try:
        config = AutoscalingConfig(**replicas)
    except ValueError as error:
        raise ConfigError(
            f"replicas: got {dict(replicas)}, which Ray Serve does not allow: {error}"
        ) from error
    if config.min_replicas < 1:
        raise ConfigError(f"replicas: got min_replicas {config.min_replicas}, allowed is 1 or more")
    return {"autoscaling_config": config}


def _start_ray(config: EngineConfig, scaling: Mapping[str, Any]) -> dict[str, int]:
    """Start Ray here, or connect to the cluster that RAY_ADDRESS names; return the resources of each replica.

    Raises:
        ConfigError: this fails, or Ray has too few GPUs or cores for the initial number of replicas.
    """
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        ray.init(logging_level=logging.WARNING, **({} if "RAY_ADDRESS" in os.environ else own))
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"replicas: Ray cannot be started, or reached ({_first_line(error)})") from error
    present = ray.cluster_resources()
    is_on_gpu = config.device == "cuda" or (config.device == "auto" and present.get("GPU", 0) >= 1)
    scale = scaling.get("autoscaling_config")
    count = scaling["num_replicas"] if scale is None else max(scale.min_replicas, scale.initial_replicas or 0)
    what, allowed = ("GPU", int(present.get("GPU", 0))) if is_on_gpu else ("core", int(present.get("CPU", 0)))
    if count > allowed:
        ray.shutdown()
        raise ConfigError(
            f"replicas: got {count}, allowed are at most {allowed}, one for each {what} that Ray has"
        )
    return {"num_cpus": 1, "num_gpus": int(is_on_gpu)}


def _run(application: serve.Application, name: str) -> DeploymentHandle:
    """Start an application and wait until its replicas have loaded the model.

    Raises:
        ConfigError: see ``RemoteEngine``.
        ModelError: see there.
        EngineDeadError: a replica ended for another reason.
    """
    try:
        return serve.run(application, name=name, route_prefix=None)
    except RuntimeError as error:
        # Ray Serve passes the replica's error on as text, with its traceback.
        report = serve.status().applications[name].deployments[DEPLOYMENT_NAME].message
        found = re.findall(r"^rose_backend\.errors\.(ConfigError|ModelError): (.+)", report, re.MULTILINE)
        if found:
            kind, text = found[-1]
            raise getattr(errors, kind)(text) from error
        raise EngineDeadError(f"a replica ended while it was loading the model: {report}") from error


def _stop(app_name: str) -> None:
    """Stop the replicas, and Ray unless others started it."""
    try:
        serve.delete(app_name)
    except Exception as error:
        logger.warning("Ray Serve did not stop the replicas: %s", _first_line(error))
    ray.shutdown()


def _sum_counters(all_time: Iterable[Counters], present: Sequence[EngineLoad]) -> Counters:
    """Sum counters since the start over all replicas, and the current load over those that run.

    Args:
        all_time: the latest counters of each replica, dead ones included.
        present: the load of each running replica.
    """
    stats = EngineStats()
    for each, _ in all_time:
        for name in (field.name for field in dataclasses.fields(EngineStats)):
            ours, theirs = getattr(stats, name), getattr(each, name)
            if isinstance(theirs, tuple):
                theirs = tuple(map(sum, itertools.zip_longest(ours, theirs, fillvalue=0)))
                setattr(stats, name, theirs)
            else:
                setattr(stats, name, ours + theirs)
    load = EngineLoad(
        sum(each.num_running for each in present),
        sum(each.num_waiting for each in present),
        sum(each.kv_cache_usage for each in present) / max(len(present), 1),
    )
    return Counters(stats, load)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
