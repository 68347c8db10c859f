"""What a trainer process is told at its start. No torch here: the controller builds it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from offbeat.config import Config, LossSection, TrainerSection


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """JSON-able; the sections travel as `model_dump(mode="json")` gives them."""

    model: str
    """A folder or a hub id."""
    revision: str | None = None
    init: Literal["pretrained", "random"] = "pretrained"
    seed: int = 0
    trainer: dict[str, Any] = {}
    loss: dict[str, Any] = {}
    total_updates: int
    """Optimizer updates of the whole run: where a decaying learning rate ends."""

    @staticmethod
    def of(config: Config) -> TrainerSettings:
        """The settings of a run's trainer."""
        return TrainerSettings(
            model=config.model,
            revision=config.revision,
            init=config.init,
            seed=config.seed,
            trainer=config.trainer.model_dump(mode="json"),
            loss=config.loss.model_dump(mode="json"),
            total_updates=config.steps * config.updates_per_step * config.epochs_per_batch,
        )

    def trainer_section(self) -> TrainerSection:
        return TrainerSection.model_validate_json(msgspec.json.encode(self.trainer))

    def loss_section(self) -> LossSection:
        return LossSection.model_validate_json(msgspec.json.encode(self.loss))
