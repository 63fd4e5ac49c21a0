"""Memory that several CUDA graphs share."""

import torch

__all__ = ["GraphMemory"]


class GraphMemory:
    """A pool of torch's allocator that graphs are captured in.

    torch gives a pool up with the last graph that was begun in it. As long as a tensor still lies there it then refuses
    to capture into the pool again (`use_count > 0` in CUDACachingAllocator), so the first graph is kept here, whether
    anybody still replays it or not. What all graphs of the pool need at most stays reserved for them until this object
    is gone, even when all other graphs are.

    Attributes:
        handle: As `CUDAGraph.capture_begin` takes it.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None

    def begin(self, graph: torch.cuda.CUDAGraph) -> None:
        """Begin to capture on the current stream; other threads may allocate and launch meanwhile."""
        graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
        if self._first is None:
            self._first = graph
