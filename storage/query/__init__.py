"""SQL over the commits and tables of all runs of a store. `docs/sql.md` describes the views.

    open_query(open_store("s3://bucket/prefix")).sql("select iteration, avg(reward) from rewards group by 1")

Nothing is copied: DuckDB reads the Parquet files in place, and only the files and columns that a query names. The cache
of commits between queries (`cairn.storage.query.catalogue`) is disposable.
"""

from cairn.storage.query.database import Query, open_query
from cairn.storage.query.sample_views import Column, View
from cairn.storage.query.views import VIEWS
from cairn.storage.store.errors import BadQuery

__all__ = ["VIEWS", "BadQuery", "Column", "Query", "View", "open_query"]
