"""What offbeat uses of transformers, for the type checker: reading the package itself takes it a third of its time."""

from typing import Any

from torch import nn

def __getattr__(name: str) -> Any: ...

class PreTrainedModel(nn.Module):
    config: Any
    generation_config: Any
    def __getattr__(self, name: str) -> Any: ...
