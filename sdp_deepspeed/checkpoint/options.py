"""The part of the config block that is about checkpoints."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CheckpointOptions(BaseModel):
    """`subnetwork_data_parallel.checkpoint`; a field's description is what its error message says was expected."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    asynchronous: bool = Field(default=False, description="true or false")
    keep_last: int | None = Field(default=None, ge=1, description="a whole number of checkpoints to keep, at least 1")
