"""A transformers cache object over our cache: its layers stand for slots of ours until somebody else wants them.

`generate` hands a cache from call to call and asks only for its length. As long as it does, keys and values stay where
the tuned programs keep them. Whoever does anything else with the cache (a beam that is reordered, a call that the
programs do not answer, code that reads the keys) gets layers of transformers' own, filled with copies.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.program import Program

__all__ = ["CacheMemory", "Session", "SessionStore"]

_SPARE_AT_MOST = 4


class CacheMemory:
    """A cache of ours, and the streams that work on it: whoever gets it next may be on another one.

    Args:
        cache: Keys and values.
        current_stream: Tells the caller's; `None` on a CPU.
    """

    def __init__(self, cache: KVCache, current_stream: Callable[[], torch.cuda.Stream | None]) -> None:
        self.cache = cache
        self._current_stream = current_stream
        self._streams: list[torch.cuda.Stream] = []

    def used(self) -> None:
        """Note that the current stream works on it."""
        stream = self._current_stream()
        if stream is not None and stream not in self._streams:
            self.cache.record_stream(stream)
            self._streams.append(stream)

    def take(self) -> None:
        """Let the current stream wait for all others that worked on it for whoever had it before."""
        stream = self._current_stream()
        if stream is not None:
            for other in self._streams:
                if other != stream:
                    stream.wait_stream(other)
            self._streams.clear()
            self.used()


class Session:
    """One cache object and the rows that stand behind it; used by one thread at a time, as the cache object is.

    Args:
        cache: transformers' cache, empty.
        memory: Our cache, with as many rows as the call has.
        pads: Empty columns that each row begins with, as transformers counts them.
        layers: How many the model has.

    Attributes:
        length: Columns that are filled, those included.
        positions: (rows, 1): where each row's next token goes.
    """

    def __init__(self, cache: Any, memory: CacheMemory, pads: list[int], layers: int) -> None:
        self.memory = memory
        self.pads = pads
        self.length = 0
        self._cache = weakref.ref(cache)
        self._own: list[Any] = list(cache.layers) or [cache.layer_class_to_replicate() for _ in range(layers)]
        self._handed_over = False
        device = next(iter(memory.cache.slice(0, 1).values())).device
        self.pads_column = torch.tensor(pads, device=device)[:, None]
        self.positions = -self.pads_column
        cache.layers[:] = [_layer_class()(self, index) for index in range(layers)]

    @property
    def alive(self) -> bool:
        """Whether our cache still is what the cache object holds."""
        return not self._handed_over

    def advance(self, columns: int) -> None:
        """Note that the rows have so many tokens more."""
        self.length += columns
        self.positions += columns

    def hand_over(self) -> list[Any]:
        """Fill layers of transformers' own and put them into the cache object; once."""
        if not self._handed_over:
            self._handed_over = True
            self.memory.used()
            for index, layer in enumerate(self._own):
                layer.update(*(self._copied(name, index) for name in ("k_cache", "v_cache")))
            self._put_back()
        return self._own

    def close(self) -> None:
        """Give the cache object its own layers back, empty as they are."""
        self._handed_over = True
        self._put_back()

    def _put_back(self) -> None:
        cache = self._cache()
        if cache is not None:
            cache.layers[:] = self._own

    def _copied(self, name: str, layer: int) -> Tensor:
        rows = self.memory.cache.slice(0, len(self.pads))[f"{name}.{layer}"]
        made = rows.new_zeros(rows.shape[0], rows.shape[1], self.length, rows.shape[3])
        for row, pad in enumerate(self.pads):
            made[row, :, pad:] = rows[row, :, : self.length - pad]
        return made

    def own_layer(self, index: int) -> Any:
        """Return transformers' own layer, as it was before; for what is no state."""
        return self._own[index]


@lru_cache(maxsize=1)
def _layer_class() -> Any:
    """Make the class of layers that stand for slots of ours; transformers is imported by whoever attaches."""
    from transformers.cache_utils import CacheLayerMixin

    def delegated(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._session.hand_over()[self._index], name)(*args, **kwargs)

        return method

    def initialise(self: Any, session: Session, index: int) -> None:
        own = session.own_layer(index)
        self.__dict__.update(_session=session, _index=index, is_initialized=True)
        self.__dict__["is_sliding"] = getattr(own, "is_sliding", False)

    def get_seq_length(self: Any) -> int:
        session: Session = self._session
        return session.length if session.alive else int(session.hand_over()[self._index].get_seq_length())

    def get_attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._session.hand_over()[self._index], name)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        setattr(self._session.hand_over()[self._index], name, value)

    methods = {n for n in dir(CacheLayerMixin) if not n.startswith("__") and callable(getattr(CacheLayerMixin, n))}
    members = {name: delegated(name) for name in methods}
    # Dynamic layers have no maximum; transformers renamed the question.
    members.update(dict.fromkeys(methods & {"get_max_length", "get_max_cache_shape"}, lambda _: -1))
    return type(
        "TunedLayer",
        (CacheLayerMixin,),
        {
            **members,
            "__init__": initialise,
            "__getattr__": get_attribute,
            "__setattr__": set_attribute,
            "get_seq_length": get_seq_length,
            "is_croppable": True,
        },
    )


class SessionStore:
    """Opens sessions, and keeps memory for the next ones; safe to use from several threads.

    Args:
        decode: The program whose caches are allocated.
        device: Where.
    """

    def __init__(self, decode: Program, device: torch.device) -> None:
        self._decode = decode
        self._device = device
        self.layers = sum(item.role == "cache" for item in decode.inputs) // 2
        self._spare: deque[CacheMemory] = deque(maxlen=_SPARE_AT_MOST)
        self._lock = threading.Lock()

    @property
    def spare(self) -> int:
        """How many caches wait for their next use."""
        return len(self._spare)

    def memory(self, rows: int) -> CacheMemory:
        """Return a cache with so many rows; a spare one if there is one."""
        with self._lock:
            memory = self._find_spare(rows)
        if memory is None:
            memory = CacheMemory(KVCache(self._decode, rows, self._device), self._current_stream)
        memory.take()
        return memory

    def _find_spare(self, rows: int) -> CacheMemory | None:
        for _ in range(len(self._spare)):
            try:
                memory = self._spare.popleft()
            except IndexError:  # one more was given back meanwhile, and the oldest fell out
                return None
            if memory.cache.rows == rows:
                return memory
            self._spare.append(memory)
        return None

    def _current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def give_back(self, memory: CacheMemory) -> None:
        """Keep a cache that nobody uses any more.

        The garbage collector calls it, on any thread and in the middle of anything, `memory` too: it takes no lock.
        """
        self._spare.append(memory)

    def open(self, cache: Any, pads: list[int]) -> Session:
        """Begin a session for an empty cache object; its memory comes back when nothing holds the session's layers."""
        memory = self.memory(len(pads))
        session = Session(cache, memory, pads, self.layers)
        weakref.finalize(session, self.give_back, memory).atexit = False
        return session

    @staticmethod
    def of(cache: Any) -> Session | None:
        """Return the session behind a cache object, if it still has one."""
        layers = getattr(cache, "layers", None) or [None]
        session = layers[0].__dict__.get("_session") if type(layers[0]) is _layer_class() else None
        return session if session is not None and session.alive else None
