"""Names that guides to slime import from `slime.data`."""

from cairn.engines.agents.slime import Sample as Sample
from cairn.tasks.data.slime_source import RolloutDataSource as RolloutDataSource
from cairn.tasks.data.slime_source import RolloutDataSourceWithBuffer as RolloutDataSourceWithBuffer
