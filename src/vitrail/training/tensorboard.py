"""TensorBoard event files of scalars: records of length, checksum, protocol-buffer message, checksum.

Written by hand, so that every run has them: `torch.utils.tensorboard.SummaryWriter` needs the package tensorboard.
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


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def masked_checksum(data: bytes) -> int:
    """CRC-32C, masked as in TensorFlow's record format."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class EventFile(Observer):
    """Appends scalars by name; every record is flushed. If the disk is full, scalars are lost and the run goes on."""

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._write(_double(1, time.time()) + _text(3, b"brain.Event:2"))

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write the numbers of steps and evaluations as `step/loss`, `evaluate/accuracy` and so on."""
        if event not in ("step", "evaluate"):
            return
        scalars = {
            f"{event}/{key}": float(value)
            for key, value in fields.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("step", "seconds")
        }
        if scalars and "step" in fields:
            with contextlib.suppress(OSError):
                self.add(fields["step"], scalars)

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Write scalars of one step."""
        values = b"".join(_text(1, _text(1, name.encode()) + _float(2, value)) for name, value in scalars.items())
        self._write(_double(1, time.time()) + b"\x10" + _varint(step) + _text(5, values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, message: bytes) -> None:
        length = struct.pack("<Q", len(message))
        checks = [struct.pack("<I", masked_checksum(part)) for part in (length, message)]
        self._file.write(length + checks[0] + message + checks[1])


def _varint(number: int) -> bytes:
    low, number = number & 127, number >> 7
    return bytes([low | 128]) + _varint(number) if number else bytes([low])


def _text(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _double(field: int, number: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", number)


def _float(field: int, number: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", number)
