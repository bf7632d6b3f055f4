"""What runs a `StepProgram`."""

from appliance.engine.executors.base import LOGITS_BYTES, Executor
from appliance.engine.executors.cpu_executor import CpuExecutor
from appliance.engine.executors.torch_executor import TorchExecutor

__all__ = ["LOGITS_BYTES", "CpuExecutor", "Executor", "TorchExecutor"]
