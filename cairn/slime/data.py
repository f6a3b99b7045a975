"""Names that guides to slime import from `slime.data`."""

from cairn.engines.agents.slime import Sample as Sample
from cairn.tasks.slime import RolloutDataSource as RolloutDataSource
from cairn.tasks.slime import RolloutDataSourceWithBuffer as RolloutDataSourceWithBuffer
