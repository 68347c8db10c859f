"""Every section of a configuration: frozen, typed, each field with its unit; and what each recipe sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from offbeat.types import Sampling

Json: TypeAlias = dict[str, Any]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Index: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=1e7)]
Threads: TypeAlias = Annotated[int, Field(ge=1, le=4096)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Weight: TypeAlias = Annotated[float, Field(ge=-1e6, le=1e6)]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Recipe: TypeAlias = Literal["grpo", "dr_grpo"]
Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "constant"]
Dtype: TypeAlias = Literal["float32", "bfloat16"]
TrackerLibrary: TypeAlias = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SamplingSection(Section):
    """How completions are sampled."""

    max_new_tokens: Count = 256
    """Longest completion, in tokens."""
    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Logits are divided by it, in the engine and in the trainer."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; 1 is off. Truncation is replayed by the trainer, and tokens outside its own nucleus are masked."""
    top_k: Index = 0
    """0 is off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """0 is off."""
    stop_token_ids: tuple[Index, ...] = ()
    """Added to the stop ids of the tokenizer and the generation config."""
    chat_template: Text | None = None
    """A Jinja file to use in place of the tokenizer's own chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the chat template by name, e.g. `enable_thinking = false`."""

    def resolve(self, stop_token_ids: Sequence[int]) -> Sampling:
        """The value that travels to the engines, with the model's stop ids merged in."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_token_ids=tuple(sorted({*stop_token_ids, *self.stop_token_ids})),
        )


class DataSection(Section):
    """One source of prompts: `[[data]]`."""

    name: Name = "data"
    """Names the source in ids, samples and metrics; unique."""
    source: Text
    """`file.jsonl`, `file.parquet`, a folder saved by `datasets`, `hf://owner/name[/config]/split[@revision]`, or
    `reasoning_gym:task`."""
    options: dict[str, Any] = {}
    """For `reasoning_gym:` the task's own parameters, e.g. `{ size = 2000, min_terms = 2 }`."""
    prompt: Text = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    answer: Text | None = None
    """Column given to reward functions as `answer`."""
    format: Literal["chat", "text"] = "chat"
    """`chat` renders the chat template; `text` takes the prompt as it is."""
    system: Text | None = None
    """A system message put before the prompt (`chat` only)."""
    rewards: dict[str, Weight] = {}
    """Reward function → weight. `file.py:function`, `package.module:function`, or a built-in one: `exact_match`,
    `math_verify`, `reasoning_gym`, `reasoning_gym_exact`."""
    weight: Positive = 1.0
    """Share of this source in the mix, relative to the others."""
    max_prompt_tokens: Count = 1024
    """Longer prompts are handled as `over_long` says."""
    over_long: Literal["drop", "error"] = "drop"
    """`drop` leaves over-long prompts out and says how many."""
    shuffle: bool = True
    """Order is a function of (seed, epoch)."""


class EvalSection(Section):
    """One held-out set: `[[eval]]`. Columns, format and rewards default to those of the first `[[data]]`."""

    name: Name = "eval"
    source: Text
    options: dict[str, Any] = {}
    prompt: Text | None = None
    answer: Text | None = None
    format: Literal["chat", "text"] | None = None
    system: Text | None = None
    rewards: dict[str, Weight] | None = None
    every_steps: Index = 0
    """Evaluate every n steps; 0: at the start and at the end only."""
    samples_per_prompt: Count = 1
    max_prompts: Count | None = None
    """Take the first n rows only."""
    max_prompt_tokens: Count | None = None
    """Left out: that of the first `[[data]]`, or what `max_new_tokens` leaves of the model's positions if that is less.
    """
    temperature: NotNegative | None = None
    """0 is greedy. Sampling fields default to those of `[sampling]`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Index | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    max_new_tokens: Count | None = None
    pass_threshold: float = 1.0
    """A sample passes when its reward is at least this (for pass@k)."""


class WarmupSection(Section):
    """Supervised steps before reinforcement learning: `[warmup]`."""

    source: Text
    """As in `[[data]]`."""
    options: dict[str, Any] = {}
    prompt: Text = "prompt"
    answer: Text = "answer"
    """Column with the continuation to imitate; the end-of-text id is added."""
    format: Literal["chat", "text"] = "chat"
    steps: Count
    samples_per_step: Count = 64
    lr: Positive = 1e-5


class RolloutSection(Section):
    """The engines: `[rollout]`."""

    engine: Literal["hf"] = "hf"
    """`hf`: offbeat's own sampler on top of transformers."""
    replicas: Count = 1
    """Engine processes; prompts are spread over them by a fixed rule."""
    python: Text | None = None
    """Interpreter of the engine processes; default: the one that runs offbeat."""
    device: Text = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, `npu:0`, …"""
    dtype: Dtype | None = None
    """Of the engine's weights; default: the trainer's compute dtype."""
    max_rows: Count = 256
    """Samples that an engine computes at once; memory only."""
    threads: Threads | None = None
    """CPU threads an engine; default: the cores shared out evenly."""


class TrainerSection(Section):
    """The trainer: `[trainer]`."""

    lr: Positive = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: Index = 10
    """Updates over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to `min_lr_ratio` of the peak by the last update."""
    min_lr_ratio: Fraction = 0.0
    weight_decay: NotNegative = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Positive = 1e-8
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global L2 norm."""
    micro_batch_tokens: Count = 16384
    """Padded tokens of one forward and backward; memory only, never changes the gradient."""
    dtype: Dtype = "bfloat16"
    """Compute dtype; master weights and optimizer state are float32 always, and so are logits."""
    gradient_checkpointing: bool = False
    device: Text = "auto"
    threads: Threads | None = None
    """CPU threads; default: the cores shared out evenly."""
    max_skipped_updates: Count = 5
    """The run stops after this many updates in a row with a non-finite gradient."""


class LossSection(Section):
    """The policy loss: `[loss]`. A recipe sets these; any of them can be overridden."""

    scale_by_std: bool = True
    """Divide advantages by the standard deviation of their group (GRPO); off in Dr. GRPO."""
    clip_low: Positive = 0.2
    clip_high: Positive = 0.28
    """The ratio to the sampling policy is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound on the loss of tokens with a negative advantage; none when null."""
    aggregation: Aggregation = "token_mean"
    """`token_mean`: over all tokens of the update. `sequence_mean`: of each sample's token mean. `constant`: sum over
    tokens divided by samples × max_new_tokens (Dr. GRPO)."""


class RewardsSection(Section):
    """Where reward functions run: `[rewards]`."""

    workers: Count = 1
    """Processes that run reward functions."""
    timeout_s: Seconds = 10.0
    """Wall-clock limit for one sample; the worker is killed and the sample's value counts as an error."""
    max_error_fraction: Fraction = 0.2
    """The run stops when a larger share of a batch's scores are errors."""


class WeightsSection(Section):
    """How weights get from the trainer to the engines: `[weights]`."""

    backend: Text = "gloo"
    """A collective backend: `gloo`, `nccl`, `hccl`, `xccl`, or one registered with torch."""
    host: Text = "127.0.0.1"
    """Address of the transfer's listener: IPv4, IPv6 (`::1`, `[fd00::1]`, `fe80::1%eth0`) or a name. No wildcard."""
    bucket_mib: Annotated[float, Field(gt=0, le=65536)] = 64.0
    """Tensors are packed into buckets of this size; two of them are held at once."""
    timeout_s: Seconds = 300.0
    """One sync, from rendezvous to commit."""
    stall_s: Seconds = 30.0
    """A single transfer operation."""
    parity_every: Index = 20
    """Compare the engines' logprobs with the trainer's at the first sync and every n-th; 0: first only."""
    parity_tolerance: Positive | None = None
    """Largest |logprob difference|; default 1e-3 for float32, for bfloat16 three times the gap of the first sync
    (at most 0.5)."""


class CheckpointSection(Section):
    """What is saved: `[checkpoint]`."""

    every_steps: Index = 0
    """0: at the end (and when interrupted) only."""
    keep_last: Count = 2
    """The newest so many stay."""
    keep_every: Index = 0
    """Those of every n-th step stay, too; 0: none for that reason."""
    best: Text | None = None
    """An evaluation, `<set>` or `<set>/avg@k` or `<set>/pass@k`: the checkpoint with its highest value stays, too."""


class TrackerSection(Section):
    """Where the run is shown while it goes: `[[trackers]]`, one for each. See docs/trackers.md."""

    kind: Text
    """`tensorboard`, `wandb`, `trackio`, `mlflow`, or one of your own: `file.py:Class`, `package.module:Class`."""
    project: Text | None = None
    """What the run belongs to (mlflow: the experiment); default `offbeat`. tensorboard has none."""
    name: Text | None = None
    """Of the run; default: the name of the run folder."""
    mode: Literal["online", "offline"] | None = None
    """wandb only; default: what the environment says, else online."""
    url: Text | None = None
    """Server of wandb, trackio or mlflow (there also `sqlite:///…`); default: the library's own."""
    dir: Text | None = None
    """Folder of tensorboard or wandb; default: in the run folder."""
    tags: tuple[Text, ...] = ()
    """Words to find the run by. tensorboard and trackio have none."""
    samples: Annotated[int, Field(ge=0, le=256)] = 8
    """So many samples of each step go to the tracker's table, evenly spread over the step; 0: no table."""
    options: dict[str, Any] = {}
    """Passed on to the library, or to your class, by name."""

    @property
    def library(self) -> TrackerLibrary | None:
        """None: a class of the user's own."""
        return next((known for known in get_args(TrackerLibrary) if known == self.kind), None)


class LimitsSection(Section):
    """How long anything may take before it is called dead: `[limits]`."""

    start_s: Seconds = 300.0
    """From the start of a process to its first sign of life with its model loaded."""
    heartbeat_s: Seconds = 10.0
    """Silence of a process's input/output thread."""
    stall_s: Seconds = 120.0
    """A busy worker without progress (no token, no layer of a model). Raise it where that is slow, not stuck."""
    generate_s: Seconds = 3600.0
    update_s: Seconds = 3600.0


class Config(Section):
    """A run. See docs/configuration.md."""

    model: Text
    """A folder, a hub id (with `revision`), or a run or one of its checkpoints: its weights are the start."""
    revision: Text | None = None
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` takes only config and tokenizer from the model folder, and trains from scratch."""
    recipe: Recipe = "grpo"
    steps: Annotated[int, Field(ge=1, le=10**9)]
    prompts_per_step: Count
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Size of a group; samples per step = prompts_per_step × samples_per_prompt."""
    max_staleness: Literal[0, 1] = 1
    """0: on-policy. 1: one step off-policy."""
    updates_per_step: Count = 1
    """Optimizer updates a step; prompts are split evenly."""
    epochs_per_batch: Count = 1
    """Passes over each batch; `updates_per_step` is counted within a pass."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    sampling: SamplingSection = SamplingSection()
    data: tuple[DataSection, ...]
    eval: tuple[EvalSection, ...] = ()
    warmup: WarmupSection | None = None
    rollout: RolloutSection = RolloutSection()
    trainer: TrainerSection = TrainerSection()
    loss: LossSection = LossSection()
    rewards: RewardsSection = RewardsSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    trackers: tuple[TrackerSection, ...] = ()
    limits: LimitsSection = LimitsSection()

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def engine_dtype(self) -> Dtype:
        return self.rollout.dtype or self.trainer.dtype


# What a recipe sets: only differences from the defaults.
RECIPES: Mapping[str, Json] = {
    "grpo": {},
    "dr_grpo": {"loss": {"scale_by_std": False, "aggregation": "constant"}},
}
