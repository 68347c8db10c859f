"""The configuration: TOML → frozen models. Precedence: default < recipe < file < `key=value`.

    sections    what there is to say, with defaults         reading     a file and overrides → Config
    fields      the dotted path of every key                problems    what is wrong with a key, in sentences
    rules       what must fit together                      paths       relative to the folder of the file

Importing it loads no torch.
"""

from offbeat.config.fields import config_fields, section_at
from offbeat.config.reading import load_config, parse_config, read_toml
from offbeat.config.sections import (
    RECIPES,
    Aggregation,
    CheckpointSection,
    Config,
    DataSection,
    Dtype,
    EvalSection,
    Json,
    LimitsSection,
    LossSection,
    Recipe,
    RewardsSection,
    RolloutSection,
    SamplingSection,
    Section,
    TrackerLibrary,
    TrackerSection,
    TrainerSection,
    WarmupSection,
    WeightsSection,
)

__all__ = [
    "RECIPES",
    "Aggregation",
    "CheckpointSection",
    "Config",
    "DataSection",
    "Dtype",
    "EvalSection",
    "Json",
    "LimitsSection",
    "LossSection",
    "Recipe",
    "RewardsSection",
    "RolloutSection",
    "SamplingSection",
    "Section",
    "TrackerLibrary",
    "TrackerSection",
    "TrainerSection",
    "WarmupSection",
    "WeightsSection",
    "config_fields",
    "load_config",
    "parse_config",
    "read_toml",
    "section_at",
]
