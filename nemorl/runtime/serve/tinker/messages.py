"""The protocol's messages: fields of JSON bodies, protobuf, and arrays in it."""

from typing import Any, TypeVar

import numpy as np
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError

from nemorl.runtime.serve.wire import Refused, demand

FIELDS = {
    "Csr": "values:bytes rows:bytes columns:bytes",
    "Tensor": "dense:bytes csr:Csr dtype:int32 shape:*int64",
    "Text": "tokens:bytes",
    "Chunk": "text:Text image:bytes audio:bytes",
    "Input": "key:string value:Tensor",
    "Datum": "chunks:*Chunk inputs:*Input",
    "Number": "key:string value:double",
    "Setting": "number:double text:string",
    "NamedSetting": "key:string value:Setting",
    "ForwardBackwardRequest": "model_id:string seq_id:int32 data:*Datum loss_fn:string"
    " numbers:*Number forward_only:bool settings:*NamedSetting",
    "Batched": "data:bytes offsets:bytes dtype:int32 trailing_shape:*int64",
    "NamedBatched": "key:string value:Batched",
    "Record": "type_tag:string fields:*NamedBatched num_datums:int64",
    "ForwardBackwardOutput": "type_name:string records:*Record metrics:*Number",
    "TopK": "ids:bytes logprobs:bytes k:uint32 length:uint32",
    "Sequence": "reason:int32 tokens:bytes logprobs:bytes top:TopK",
    "Alternatives": "tokens:Tensor logprobs:Tensor",
    "SampleResponse": "sequences:*Sequence prompt_logprobs:bytes top:TopK cached:int32"
    " targets:Tensor alternatives:Alternatives",
}
"""Of each message, in the order of their numbers; * stands for several, of maps the entries."""
DTYPES = {1: "<f4", 2: "<i8", 3: "<i4", 4: "<u2"}


def _made() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="nemorl_tinker", syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for number, each in enumerate(fields.split(), start=1):
            field, kind = each.split(":")
            made = message.field.add(name=field, number=number, label=3 if "*" in kind else 1)
            if (kind := kind.strip("*")) in FIELDS:
                made.type, made.type_name = 11, f".{kind}"
            else:
                made.type = getattr(made, f"TYPE_{kind.upper()}")
    return message_factory.GetMessages([file])


MESSAGES = _made()


class Fields(BaseModel, extra="forbid"):
    """Fields of a JSON body; any other is refused by its name."""

    type: str | None = None


F = TypeVar("F", bound=Fields)


def read_fields(kind: type[F], body: bytes) -> F:
    """Return the fields of a JSON body. Raises: Refused."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(f"{where}: {first['msg']}: correct it", field=where) from None


def read_work_message(body: bytes) -> Any:
    """Return a ForwardBackwardRequest. Raises: Refused."""
    try:
        return MESSAGES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise Refused(f"the body must be a ForwardBackwardRequest ({error})") from error


def array(tensor: Any, field: str) -> np.ndarray:
    """Return the array of a Tensor message. Raises: Refused."""
    kind, shape = DTYPES.get(tensor.dtype), tuple(tensor.shape)
    demand(kind is not None, field, "must be of float32, int64, int32 or bfloat16", "convert it")
    try:
        if not tensor.csr.rows:
            values = np.frombuffer(tensor.dense, kind).reshape(shape or -1)
        else:
            rows = np.frombuffer(tensor.csr.rows, "<i8")
            columns = np.frombuffer(tensor.csr.columns, "<i8")
            given = np.frombuffer(tensor.csr.values, kind)
            (height, _), counts = shape, np.diff(rows)
            fits = len(counts) == height and min(counts) >= 0 == rows[0]
            fits &= len(given) == len(columns) == rows[-1] and min(columns, default=0) >= 0
            demand(bool(fits), field, "must be a CSR matrix", "send a dense array")
            values = np.zeros(shape, given.dtype)
            values[np.repeat(np.arange(height), counts), columns] = given
    except (ValueError, IndexError) as error:
        raise Refused(f"{field} must fit its shape {shape} ({error})", field=field) from error
    return (values.astype("<u4") << 16).view("<f4") if tensor.dtype == 4 else values


def tensor(values: np.ndarray) -> Any:
    """Return a dense Tensor message of float32 or int64."""
    dtype, kind = (2, "<i8") if values.dtype.kind == "i" else (1, "<f4")
    return MESSAGES["Tensor"](dense=values.astype(kind).tobytes(), dtype=dtype, shape=values.shape)
