"""TensorBoard: `--track tensorboard`. Its files are in the run directory; values are float32."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from samestep.show.tracking import Scalar, Started, TrackedRecord, TrackedResult, TrackedRun

COUNTS_AT_END = True  # what was written counts once its file is closed


def start(run: TrackedRun) -> Started:
    """Open one more event file of the run; TensorBoard reads all that a folder holds."""
    writer = EventFileWriter(str(run.folder))
    _write_table(writer, "settings", run.settings, run.started_at)
    about = {"project": run.project, "name": run.name, **run.facts}
    about |= {"tags": ", ".join(run.tags)} if run.tags else {}
    _write_table(writer, "facts", about, run.started_at)
    return Started(client=writer)


def record(client: EventFileWriter, entries: Sequence[TrackedRecord]) -> None:
    """Write the scalars, each over its own axis."""
    for entry in entries:
        values = [Summary.Value(tag=tag, simple_value=v) for tag, v in entry.values.items()]
        if entry.picture is not None and (content := entry.picture.png()):
            # A PNG file begins with 16 bytes of signature and header, then its width and height.
            width, height = struct.unpack(">II", content[16:24])
            image = Summary.Image(height=height, width=width, encoded_image_string=content)
            values.append(Summary.Value(tag=f"pictures/{entry.picture.name}", image=image))
        client.add_event(Event(wall_time=entry.time, step=entry.at, summary=Summary(value=values)))
    client.flush()


def finish(client: EventFileWriter, result: TrackedResult) -> None:
    """Write the result as text, and close the file."""
    _write_table(client, "result", {"status": result.status, **result.values}, None)
    client.close()


def _write_table(
    writer: EventFileWriter, tag: str, table: Mapping[str, Scalar], wall_time: float | None
) -> None:
    """Write a table in Markdown, as TensorBoard's page of texts shows it."""
    rows = "".join(f"| {key} | {value} |\n" for key, value in table.items())
    text: Any = TensorProto(
        dtype=DT_STRING,
        string_val=[f"| | |\n|-|-|\n{rows}".encode()],
        tensor_shape=TensorShapeProto(),
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Summary.Value(tag=tag, metadata=metadata, tensor=text)
    writer.add_event(Event(wall_time=wall_time, step=0, summary=Summary(value=[value])))
