"""The log: one JSON object a line on standard error. No text of a request or an answer is ever in it."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import datetime, timezone

LOGGER = logging.getLogger("selfspec.serve")


class JsonFormatter(logging.Formatter):
    """Writes a record as a JSON object: time, level, message, the fields of ``extra={"fields": …}``, and errors."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log(
    message: str,
    level: int = logging.INFO,
    *,
    error: BaseException | None = None,
    fields: Mapping[str, object] | None = None,
) -> None:
    """Writes a line with more fields, and with the traceback of an error."""
    LOGGER.log(level, message, extra={"fields": fields or {}}, exc_info=error)


def set_up_logs() -> None:
    """Sends the log, uvicorn's warnings included, to standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, lowest in (("selfspec", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(lowest)
