"""What the critic's optimizer has of its own."""

from pydantic import Field

from cairn.configs.schema.base import Section
from cairn.configs.schema.schedule import DecayStyle, IncreaseStyle, WSDStyle


class CriticConfig(Section):
    """Options of the critic that differ from those of the same name in `training`, which hold for both where these are
    null. Its learning rate is `critic_lr`, its warm-up `critic_lr_warmup_iters`. slime: the entry of the role `critic`
    in the file of `--megatron-config-path`."""

    min_lr: float | None = Field(None, ge=0)
    """As `training.min_lr`."""

    lr_warmup_init: float | None = Field(None, ge=0)
    """As `training.lr_warmup_init`."""

    lr_decay_style: DecayStyle | None = None
    """As `training.lr_decay_style`."""

    lr_decay_iters: int | None = Field(None, ge=1)
    """As `training.lr_decay_iters`, in optimizer steps of the critic."""

    lr_wsd_decay_style: WSDStyle | None = None
    """As `training.lr_wsd_decay_style`."""

    lr_wsd_decay_iters: int | None = Field(None, ge=1)
    """As `training.lr_wsd_decay_iters`."""

    weight_decay: float | None = Field(None, ge=0)
    """As `training.weight_decay`."""

    weight_decay_incr_style: IncreaseStyle | None = None
    """As `training.weight_decay_incr_style`."""

    start_weight_decay: float | None = Field(None, ge=0)
    """As `training.start_weight_decay`."""

    end_weight_decay: float | None = Field(None, ge=0)
    """As `training.end_weight_decay`."""

    adam_beta1: float | None = Field(None, ge=0, lt=1)
    """As `training.adam_beta1`."""

    adam_beta2: float | None = Field(None, ge=0, lt=1)
    """As `training.adam_beta2`."""

    adam_eps: float | None = Field(None, gt=0)
    """As `training.adam_eps`."""

    clip_grad: float | None = Field(None, ge=0)
    """As `training.clip_grad`."""

    @property
    def own(self) -> dict[str, object]:
        """Those that are set."""
        return {name: value for name, value in self if value is not None}
