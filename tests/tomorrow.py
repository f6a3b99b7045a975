"""A clock that is a day ahead."""

import datetime


class Tomorrow(datetime.datetime):
    """Stands in for `datetime` where a module asks for the time."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        """The time, a day later."""
        return datetime.datetime.now(tz) + datetime.timedelta(days=1)
