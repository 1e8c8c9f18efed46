"""Of which class of vLLM a value is that is ``Any`` in our code, and what nobody can say."""

from __future__ import annotations

FACING = ("_compat", "modules/backends/vllm/")
ABOUT_OTHERS = ("_compat_memory.py", "_compat_transformers.py", "_compat_transformers.py")  # torch and transformers
"""Where names mean objects of vLLM, but for the latter."""

OBJECTS = {
    # configuration
    "engine_args": "vllm.engine.arg_utils.AsyncEngineArgs",
    # the engine's process
    "_compat.py:_adapted_sizes:linear": "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA",
    "_compat.py:_adapted_sizes:base": "vllm.model_executor.layers.linear.LinearBase",
    # the engine core's process
    "queue": "vllm.v1.core.sched.request_queue.RequestQueue",
    # a worker's process
    "lists": "vllm.v1.outputs.SamplingMaskLists",
    "method": "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase",
    # no objects of vLLM
    "tokenizer": "plain",  # of transformers
    "logits": "plain",
}
"""A name, or ``file:name``, or ``file:function:name`` -> its class, as an annotation; ``plain`` is none of vLLM's."""

MIXED_INTO = {
    "torchrl_moe.modules.backends.vllm.worker.WorkerExtension": "vllm.v1.worker.gpu_worker.Worker",
}
"""A class of ours -> the one of vLLM that it is mixed into."""

FIELDS = {
    "modules/backends/vllm/engine_args.py:DEFAULTS": "vllm.engine.arg_utils.AsyncEngineArgs",
    "modules/backends/vllm/continuation.py:STATEFUL": "vllm.sampling_params.SamplingParams",
    "modules/backends/replica.py:KEEPS_ALL": "vllm.sampling_params.SamplingParams",
}
"""``file:name`` of a tuple or a mapping of fields' names -> their class."""

UNRESOLVED = {
    "modules/policies/vllm_wrapper.py:params": "a mapping",
    "modules/serving/async_vllm.py:*": "replicas and services of ours, which have names of their own",
    "modules/serving/requests.py:*": "arrays and tensors of users",
    "modules/backends/vllm/adapters.py:getattr(lora, name)": "all fields that vLLM's own class lists",
    "modules/backends/vllm/cpu_kernels.py:*": "tensors; the parameters of the kernels that it replaces are looked up",
    "modules/backends/vllm/formula_kernel.py:*": "values inside a Triton kernel",
    "modules/backends/vllm/forced_routing.py:getattr(self, name)": "a queue of waiting requests, found by its class",
    "_compat.py:one": "the handle that vLLM's CPU kernel sets on a layer: the tests of weight updates need it",
    "modules/backends/vllm/engine_args.py:getattr(engine_args, field.name)": "all fields that vLLM's own class lists",
    "modules/backends/vllm/sampling.py:getattr(params, name)": "the names of KEEPS_ALL",
    "modules/backends/vllm/sampling.py:getattr(SamplingParams(), name)": "a name that the user gives",
    "modules/backends/vllm/engine_args.py:record": "of Python's logging",
    "_compat.py:step": "a chunk of a sampling mask, an array",
    "http/engine_client.py:self.renderer": "what renderer_from_config returns: a test of each endpoint renders by it",
    "http/engine_client.py:values": "an array of ours",
    "http/engine_client.py:versions": "an array of ours",
    "http/door.py:arguments": "vLLM's own parsed arguments: serve_http sets and reads them at each start",
    "http/door.py:client.renderer": "as above",
    "http/door.py:tokenizer": "of transformers",
    "http/door.py:state": "what vLLM's init_app_state has set: a handler that is missing there fails at each start",
    "http/door.py:handler": "one of those handlers",
    "http/door.py:raw_request": "of starlette",
    "http/door.py:body": "JSON",
    "http/door.py:request": "a chat, of the handler that is wrapped: the tests of sessions need both entries",
    "http/door.py:calls": "JSON",
    "http/door.py:name": "of a header, as ASGI has it",
    "http/door.py:value": "as above",
    "http/door.py:scope['raw_path']": "of ASGI",
}
"""``file:expression``, or ``file:*`` -> why it is not looked up."""

NOT_IN_EACH = {
    "vllm.v1.worker.gpu_worker.HAS_TRITON": "0.33 asks there; 0.32 in the configuration, which is set, too",
    "vllm.model_executor.layers.fused_moe.router.base_router.BaseRouter.routed_scaling_factor": "some routers have it",
}
"""What not every release has, as it would be reported -> why that is right."""
