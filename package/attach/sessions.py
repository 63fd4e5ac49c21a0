"""A transformers cache object over our cache: its layers stand for slots of ours until somebody else wants them.

`generate` hands a cache from call to call and asks only for its length. As long as it does, keys and values stay where
the tuned programs keep them. Whoever does anything else with the cache (a beam that is reordered, a call that the
programs do not answer, code that reads the keys) gets layers of transformers' own, filled with copies.
"""

import weakref
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.program import Program

__all__ = ["Session", "SessionStore"]

_SPARE_AT_MOST = 4


class Session:
    """One cache object and the rows that stand behind it.

    Args:
        cache: transformers' cache, empty.
        memory: Our cache, with as many rows as the call has.
        pads: Empty columns that each row begins with, as transformers counts them.
        layers: How many the model has.

    Attributes:
        length: Columns that are filled, those included.
        positions: (rows, 1): where each row's next token goes.
    """

    def __init__(self, cache: Any, memory: KVCache, pads: list[int], layers: int) -> None:
        self.memory = memory
        self.pads = pads
        self.length = 0
        self._cache = weakref.ref(cache)
        self._own: list[Any] = list(cache.layers) or [cache.layer_class_to_replicate() for _ in range(layers)]
        self._handed_over = False
        device = next(iter(memory.slice(0, 1).values())).device
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
            for index, layer in enumerate(self._own):
                layer.update(*(self._copied(name, index) for name in ("k_cache", "v_cache")))
            cache = self._cache()
            if cache is not None:
                cache.layers[:] = self._own
        return self._own

    def _copied(self, name: str, layer: int) -> Tensor:
        rows = self.memory.slice(0, len(self.pads))[f"{name}.{layer}"]
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
    """Sessions by cache object, and memory for the next ones.

    Args:
        decode: The program whose caches are allocated.
        device: Where.
    """

    def __init__(self, decode: Program, device: torch.device) -> None:
        self._decode = decode
        self._device = device
        self.layers = sum(item.role == "cache" for item in decode.inputs) // 2
        self._spare: list[KVCache] = []

    def memory(self, rows: int) -> KVCache:
        """Return a cache with so many rows; a spare one if there is one."""
        for index, cache in enumerate(self._spare):
            if cache.rows == rows:
                return self._spare.pop(index)
        return KVCache(self._decode, rows, self._device)

    def give_back(self, memory: KVCache) -> None:
        """Keep a cache that nobody uses any more."""
        self._spare.append(memory)
        del self._spare[:-_SPARE_AT_MOST]

    def open(self, cache: Any, pads: list[int]) -> Session:
        """Begin a session for an empty cache object; its memory comes back when the object is gone."""
        memory = self.memory(len(pads))
        session = Session(cache, memory, pads, self.layers)
        weakref.finalize(cache, self.give_back, memory)
        return session

    @staticmethod
    def of(cache: Any) -> Session | None:
        """Return the session behind a cache object, if it still has one."""
        layers = getattr(cache, "layers", None) or [None]
        session = layers[0].__dict__.get("_session") if type(layers[0]) is _layer_class() else None
        return session if session is not None and session.alive else None
