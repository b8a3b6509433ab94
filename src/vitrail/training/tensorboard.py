"""TensorBoard event files with scalars: records of length, checksum, protocol-buffer message, checksum.

The format is implemented here, because `torch.utils.tensorboard.SummaryWriter` needs the package tensorboard, which is
not a dependency.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.training.observer import Observer

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected


def _make_crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _make_crc_table()


def masked_checksum(data: bytes) -> int:
    """Return the CRC-32C of `data`, masked as in the record format of TensorFlow."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class EventFile(Observer):
    """Observer that appends scalars to a TensorBoard event file and flushes every record.

    If the disk is full, scalars are lost and training continues.
    """

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._write_record(_encode_double(1, time.time()) + _encode_bytes(3, b"brain.Event:2"))

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write the numbers of steps and evaluations as scalars such as `step/loss` and `evaluate/accuracy`."""
        if event not in ("step", "evaluate"):
            return
        scalars = {
            f"{event}/{key}": float(value)
            for key, value in fields.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("step", "seconds")
        }
        if scalars and "step" in fields:
            with contextlib.suppress(OSError):
                self.add_scalars(fields["step"], scalars)

    def add_scalars(self, step: int, scalars: dict[str, float]) -> None:
        """Append the scalars of one step to the file."""
        values = b"".join(
            _encode_bytes(1, _encode_bytes(1, name.encode()) + _encode_float(2, value))
            for name, value in scalars.items()
        )
        self._write_record(_encode_double(1, time.time()) + b"\x10" + _encode_varint(step) + _encode_bytes(5, values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_record(self, message: bytes) -> None:
        length = struct.pack("<Q", len(message))
        checksums = [struct.pack("<I", masked_checksum(part)) for part in (length, message)]
        self._file.write(length + checksums[0] + message + checksums[1])


def _encode_varint(number: int) -> bytes:
    low, number = number & 127, number >> 7
    return bytes([low | 128]) + _encode_varint(number) if number else bytes([low])


def _encode_bytes(field: int, content: bytes) -> bytes:
    return _encode_varint(field << 3 | 2) + _encode_varint(len(content)) + content


def _encode_double(field: int, number: float) -> bytes:
    return _encode_varint(field << 3 | 1) + struct.pack("<d", number)


def _encode_float(field: int, number: float) -> bytes:
    return _encode_varint(field << 3 | 5) + struct.pack("<f", number)
