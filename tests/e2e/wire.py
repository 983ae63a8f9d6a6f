"""The wire, spelled out: frames and messages as bytes, so that tests can send any of them wrong."""
import array
import mmap
import os
import select
import socket
import struct
import time

FRAME_BYTES_MAX = 1 << 20

TOOL, SCHEDULER, WORKER, ENGINE = range(4)

HELLO, OPEN_POOL, CLEAR, STAT, LIST, INSPECT, ADMIN = range(10, 17)
MAPPED, UNMAPPED, COMMIT, RETURN, PREFETCH, CLOSE_POOL, SUSPECT = range(20, 27)
FAILURE, HELLO_REPLY, POOL_REPLY, CLEAR_REPLY, STAT_REPLY, LIST_REPLY, INSPECT_REPLY, \
    ADMIN_REPLY = range(30, 38)
GRANT, SEGMENT, POOL_MAP, REVOKE, PROMOTED = range(40, 45)

INVALID, NOT_FOUND, EXISTS, BUSY, DENIED = 1, 4, 5, 6, 7
TIMED_OUT, PROTOCOL, VERSION, UNSUPPORTED = 9, 11, 12, 15

DEADLINE_S = 30


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Fixed64(int):
    """An int that travels as fixed64."""


def pack(fields):
    """{number: value or list of values} as a protobuf message; dicts nest."""
    out = b""
    for number, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, dict):
                value = pack(value)
            if isinstance(value, str):
                value = value.encode()
            if isinstance(value, Fixed64):
                out += varint(number << 3 | 1) + struct.pack("<Q", value)
            elif isinstance(value, int):
                out += varint(number << 3) + varint(value)
            else:
                out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def unpack(data):
    """A protobuf message as {number: [values]}."""
    fields, at = {}, 0

    def take_varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = take_varint()
        kind = tag & 7
        if kind == 0:
            value = take_varint()
        elif kind == 1:
            value = data[at:at + 8]
            at += 8
        else:
            length = take_varint()
            value = data[at:at + length]
            at += length
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def number(fields, key):
    value = fields.get(key, [0])[0]
    return struct.unpack("<Q", value)[0] if isinstance(value, bytes) else value


def envelope(body, fields=None, ident=0):
    message = {1: ident} if ident else {}
    message[body] = pack(fields or {})
    return pack(message)


def frame(message):
    return struct.pack("<I", len(message)) + message


class Message:
    def __init__(self, data, fds):
        self.fds = fds
        fields = unpack(data)
        self.ident = number(fields, 1)
        self.body = next((key for key in fields if key != 1), None)
        self.fields = unpack(fields[self.body][0]) if self.body else {}

    def number(self, key):
        return number(self.fields, key)

    def text(self, key):
        return self.fields.get(key, [b""])[0].decode()

    def close(self):
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Gone(Exception):
    """The daemon has closed the connection."""


class Peer:
    """One connection, and what it has received so far."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_S)
        try:
            self.socket.connect(path)
        except OSError:
            self.socket.close()
            raise
        self.buffer = b""
        self.fds = []
        self.waiting = []
        self.ident = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.socket.close()
        for message in self.waiting:
            message.close()
        for fd in self.fds:
            os.close(fd)
        self.fds, self.waiting = [], []

    def send_bytes(self, data):
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # what it said before is still to be read

    def send(self, body, fields=None, ident=0):
        self.send_bytes(frame(envelope(body, fields, ident)))

    def receive(self):
        """The next message; Gone when the daemon has closed."""
        while True:
            if len(self.buffer) >= 4:
                length = struct.unpack("<I", self.buffer[:4])[0]
                if len(self.buffer) >= 4 + length:
                    data = self.buffer[4:4 + length]
                    self.buffer = self.buffer[4 + length:]
                    body = next((key for key in unpack(data) if key != 1), None)
                    page = body == HELLO_REPLY and number(unpack(unpack(data)[body][0]), 5)
                    count = 1 if page or body in (POOL_REPLY, SEGMENT, POOL_MAP) else 0
                    fds, self.fds = self.fds[:count], self.fds[count:]
                    return Message(data, fds)
            try:
                data, ancillary, _, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 64))
            except ConnectionResetError as error:
                raise Gone() from error
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds = array.array("i")
                    fds.frombytes(content[:len(content) // 4 * 4])
                    self.fds += fds
            if not data:
                raise Gone()
            self.buffer += data

    def request(self, body, fields=None):
        """Send and wait for the reply; pushes that come meanwhile are kept for `pushed`."""
        self.ident += 1
        self.send(body, fields, self.ident)
        while True:
            message = self.receive()
            if message.ident == self.ident or (message.body == FAILURE and message.ident == 0):
                return message
            self.waiting.append(message)

    def pushed(self, body):
        """The next push of a kind."""
        for index, message in enumerate(self.waiting):
            if message.body == body:
                return self.waiting.pop(index)
        while True:
            message = self.receive()
            if message.body == body:
                return message
            self.waiting.append(message)

    def hello(self, role=TOOL, session=b"", rank=0, ranks=0, **fields):
        values = {1: 1, 2: 2, 3: 2, 4: role, 5: session, 6: rank, 7: ranks, 8: "test"}
        values.update(fields.get("values", {}))
        return self.request(HELLO, values)

    def stat(self):
        reply = self.request(STAT)
        metrics = {}
        for part in reply.fields[1]:
            metric = unpack(part)
            value = metric.get(4, [struct.pack("<d", 0)])[0]
            metrics[metric[1][0].decode()] = struct.unpack("<d", value)[0]
        return metrics, reply.text(2)

    def ends(self):
        """Read until the daemon closes. @return the last Failure's (status, text), if there was"""
        failure = None
        try:
            while True:
                message = self.receive()
                if message.body == FAILURE:
                    failure = (message.number(1), message.text(2))
                message.close()
        except Gone:
            return failure


class Engine(Peer):
    """A whole engine in one process, with one pool."""

    SLOT_BYTES = 65536

    def __init__(self, path, session, identity=None, read_only=False):
        super().__init__(path)
        self.maps = {}
        reply = self.hello(ENGINE, session, 0, 1)
        if reply.body != HELLO_REPLY:
            raise AssertionError(f"hello refused: {reply.text(2)}")
        self.instance = reply.number(3)
        self.page = mmap.mmap(reply.fds[0], reply.number(5))
        reply.close()
        fields = [{1: name, 2: value} for name, value in (identity or {"model": "test"}).items()]
        pool = self.request(OPEN_POOL, {1: fields, 2: self.SLOT_BYTES, 4: int(read_only)})
        if pool.body != POOL_REPLY:
            raise AssertionError(f"pool refused: {pool.text(2)}")
        self.pool = pool.number(1)
        self.pool_id = pool.fields[2][0]
        self.slots_per_segment = pool.number(5)
        pool.close()

    def close(self):
        for segment in self.maps.values():
            segment.close()
        self.maps = {}
        self.page.close()
        super().close()

    def map_segment(self):
        """Map the next segment that is pushed, and say so."""
        return self.take_segment(self.pushed(SEGMENT))

    def take_segment(self, message):
        segment, serial, length = message.number(2), message.number(3), message.number(4)
        self.maps[segment] = mmap.mmap(message.fds[0], length)
        message.close()
        header = struct.unpack_from("<QII16sQIIIIIIQQQQ", self.page, 0)
        segment_max, mapped_offset = header[9], header[13]
        struct.pack_into("<I", self.page, mapped_offset + 4 * (self.pool * segment_max + segment),
                         serial)
        self.send(MAPPED, {1: self.pool, 2: segment, 3: serial})
        return segment

    def served(self, body):
        """The next push of a kind; maps the segments that come before it, as an engine does."""
        kept = []
        while True:
            message = self.waiting.pop(0) if self.waiting else self.receive()
            if message.body == body:
                self.waiting[:0] = kept
                return message
            if message.body == SEGMENT:
                self.take_segment(message)
            else:
                kept.append(message)

    def granted(self):
        """The next grant's slots as (slot, ticket, reservation)."""
        slots = [unpack(part) for part in self.served(GRANT).fields[2]]
        return [(number(s, 1), number(s, 2), number(s, 3)) for s in slots]

    def fill(self, slot, ticket, reservation, content):
        segment, index = divmod(slot, self.slots_per_segment)
        start = index * self.SLOT_BYTES
        self.maps[segment][start:start + len(content)] = content
        mark_offset = struct.unpack_from("<Q", self.page, 72)[0]
        struct.pack_into("<Q", self.page, mark_offset + 8 * ticket, reservation)

    def commit(self, slot, ticket, reservation, key, length):
        self.send(COMMIT, {1: self.pool, 2: {1: slot, 2: ticket, 3: Fixed64(reservation), 4: key,
                                             6: length}})

    def put(self, key, content):
        """Store a block, with all that it takes."""
        if not self.maps:
            self.map_segment()
        if not getattr(self, "free", None):
            self.free = self.granted()
        slot, ticket, reservation = self.free.pop(0)
        self.fill(slot, ticket, reservation, content)
        self.commit(slot, ticket, reservation, key, len(content))


def readable(fileno, seconds):
    return bool(select.select([fileno], [], [], seconds)[0])


def until(condition, what, seconds=DEADLINE_S):
    """Ask again and again; what is asked is itself a round trip to the daemon."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
