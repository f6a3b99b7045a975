"""A clock that is a day ahead."""

import datetime


class Tomorrow(datetime.datetime):
    """Replacement of `datetime` in a module that reads the clock."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        """Return the time, a day later."""
        return datetime.datetime.now(tz) + datetime.timedelta(days=1)
