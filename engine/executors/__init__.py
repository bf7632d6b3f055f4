"""What runs a `StepProgram`."""

from appliance.engine.executors.torch_executor import TorchExecutor

__all__ = ["TorchExecutor"]
