"""Torch compat: wraps torch's private names, and names that differ between torch 2.13 and 2.15, in a file per topic.

No other package uses private names of torch, except the tables of an ``nn.Module`` (``modules.MODULE_TABLES``), which
torch cannot rename, since pickled modules contain the names. A new torch version has to be compared with this package
alone. Unless a file or a comment says otherwise, a name is the same in all three versions and has no public
replacement. This file looks up the names (``PRIVATE``) before the other files import them, so that an ImportError lists
all that a new torch lacks.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable

import torch

TESTED = "2.13", "2.14", "2.15"
"""The versions of torch that ``.ci/versions`` runs the tests with."""
PRIVATE = {
    "torch": "_assert _assert_async _foreach_copy_ _foreach_norm Tensor._backward_hooks Tensor._base "
    "Tensor._make_wrapper_subclass Tensor._post_accumulate_grad_hooks Tensor._version UntypedStorage._cdata "
    "nn.Module._compiled_call_impl "
    "nn.modules.batchnorm._BatchNorm nn.modules.batchnorm._NormBase nn.modules.dropout._DropoutNd "
    "nn.utils.parametrizations._SpectralNorm autograd.Variable._execution_engine.run_backward "
    "autograd.profiler._is_profiler_enabled distributions.Distribution._validate_args ops.aten._assert_async.msg "
    "ops.aten._assert_scalar.default ops.aten._assert_tensor_metadata.default ops.aten._local_scalar_dense.default "
    "ops.aten._to_copy.default ops.aten.add.Tensor._schema",
    "torch._C": "DisableTorchFunction PyTorchFileReader _autograd.SavedTensor _disabled_torch_function_impl "
    "_functorch.is_functorch_wrapped_tensor _get_mkldnn_enabled _len_torch_function_stack _set_grad_enabled "
    "_set_mkldnn_enabled _storage_Use_Count",
    "torch._functorch.apis": "vmap_impl",
    "torch._ops": "HigherOrderOperator OpOverload OpOverloadPacket",
    "torch._subclasses.fake_tensor": "DataDependentOutputException DynamicOutputShapeException FakeTensor "
    "FakeTensorMode UnsupportedFakeTensorException UnsupportedOperatorException",
    "torch.amp.autocast_mode": "_enter_autocast _exit_autocast",
    "torch.distributed.distributed_c10d": "_get_default_store _get_split_source _process_group_name "
    "_resolve_process_group",
    "torch.fx.experimental._config": "backed_size_oblivious patch",
    "torch.fx.experimental.proxy_tensor": "PythonKeyTracer get_proxy_mode get_proxy_slot",
    "torch.nn.modules.module": "_global_backward_pre_hooks _global_backward_hooks _global_forward_hooks "
    "_global_forward_pre_hooks",
    "torch.nn.modules._functions": "BackwardHookFunction",
    "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
    "torch.utils.checkpoint": "_checkpoint_without_reentrant_generator_impl|_checkpoint_without_reentrant_generator",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
    "torch.utils._pytree": "GetAttrKey MappingKey SUPPORTED_NODES SequenceKey TreeSpec keystr register_pytree_node "
    "tree_flatten tree_flatten_with_path tree_is_leaf tree_leaves tree_map tree_map_only tree_structure tree_unflatten",
    # Imported at their first use, as this takes a second; if the version is not TESTED, they are looked up at once.
    "torch._dynamo.backends.common": "aot_autograd",
    "torch._dynamo.source": "LocalSource",
    "torch._dynamo.variables.torch": "TorchInGraphFunctionVariable._get_handlers",
    "torch._export.passes.replace_autocast_with_hop_pass": "replace_autocast_with_hop_pass",
    "torch._export.passes.replace_set_grad_with_hop_pass": "replace_set_grad_with_hop_pass",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.fsdp": "fully_shard.state",
    "torch.distributed.tensor.debug": "_clear_sharding_prop_cache",
    "torch.fx.experimental.symbolic_shapes": "GuardOnDataDependentSymNode SYMPY_INTERP ShapeEnv.evaluate_expr "
    "ShapeEnv.produce_guards SymT.SIZE make_symbol statically_known_true",
    "torch.testing._internal.distributed.fake_pg": "FakeStore",
}
"""Module → the private or undocumented names in it that fxpipe uses; ``a|b``: of one of two versions of torch."""


def lacking(modules: Iterable[str]) -> list[str]:
    """The names of ``PRIVATE`` in these modules that the installed torch does not have; imports the modules."""
    names = [(module, name) for module in modules for name in PRIVATE[module].split()]
    return [
        f"{module}.{name}" for module, name in names if not any(_is_there(module, choice) for choice in name.split("|"))
    ]


def _is_there(module: str, name: str) -> bool:
    try:
        pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError):
        return False
    return True


IS_TESTED = ".".join(torch.__version__.split(".")[:2]) in TESTED
if _gone := lacking([module for module in PRIVATE if not IS_TESTED or module in sys.modules]):
    raise ImportError(
        f"torch {torch.__version__} no longer has {', '.join(_gone)}, which fxpipe uses; "
        f"install torch {TESTED[0]} to {TESTED[-1]}, or a newer fxpipe"
    )

from torch.utils import _pytree as pytree  # noqa: E402, F401  (trees of containers; documented, but private)
