"""Opens a teacher by where it is: an address, a recording, or a policy's folder."""

from __future__ import annotations

from pathlib import Path

from zest_jax.errors import UserError
from zest_jax.teachers.endpoint import EndpointSettings, EndpointTeacher
from zest_jax.teachers.interface import Teacher
from zest_jax.teachers.recorded import read_recording


def open_teacher(
    where: str,
    model: str = "",
    settings: EndpointSettings | None = None,
    *,
    cache: str | Path | None = None,
    ledger: str | Path | None = None,
) -> Teacher:
    """The teacher at an address (http://…), in a recording (….jsonl), or in a policy's folder.

    Args:
      where: one of these.
      model: as the endpoint calls it; for addresses only.
      settings: of an endpoint; a policy takes its `max_tokens` and `connections` from it.
      cache, ledger: see `EndpointTeacher`; for addresses only.

    Raises:
      UserError: nothing is named, or what is there cannot be opened.
    """
    settings = settings or EndpointSettings()
    if where.startswith(("http://", "https://")):
        return EndpointTeacher(where, model, settings, cache=cache, ledger=ledger)
    if not where:
        raise UserError("no teacher is named; give an address (http://…), a recording or a folder.")
    if model:
        raise UserError(f"{where} is no address, so it has no model of another name: {model}.")
    if where.endswith(".jsonl"):
        return read_recording(where)
    from zest_jax.teachers.local import load_local

    return load_local(where, max_tokens=settings.max_tokens, slots=settings.connections)
