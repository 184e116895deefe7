"""The resources that can leak or run out, each with its kinds of finding, its sentences and its advice.

A new resource is one declaration here, and one function that measures its use (`leak.Use`) and says which other
measurements confirm that it grows. `leak.leak_finding` and `exhaustion.exhaustion_finding` do the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from collector.findings import Advice, advise


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource, and the words about it. An empty kind means that it cannot leak, or has no limit of its own.

    Sentences and the effects of advice are templates. They may name `{rise}` and `{slope}` of a
    growth, `{used}` and `{limit}` of a level, every field of the locus, and what the rule adds.

    Attributes:
        leak: kind of the finding that its use keeps growing; `grows` is the sentence.
        unconfirmed: sentence on a growth that nothing confirms; `{grows}` stands for the other sentence.
        is_of_objects: True if it grows with objects that the program keeps.
        risk: kind of the finding that a limit will be met.
        max_headroom_ratio: headroom above which a forecast is no warning, as a multiple of the observed rise.
        full: sentence on a use near the limit that does not grow.
    """

    leak: str = ""
    grows: str = ""
    unconfirmed: str = "{grows}"
    leak_advice: tuple[Advice, ...] = ()
    confidence: float = 0.9
    is_of_objects: bool = False
    risk: str = ""
    risk_advice: tuple[Advice, ...] = ()
    max_headroom_ratio: float = math.inf
    full: str = ""
    full_advice: tuple[Advice, ...] = ()

    def advice(self, words: Mapping[str, object]) -> tuple[Advice, ...]:
        """Return what to do about its growth, with its effects in figures."""
        return tuple(replace(item, expected=item.expected.format(**words)) for item in self.leak_advice)


_READ_TOO_SELDOM = "{grows} Private memory was read too seldom to confirm a leak."
HEAP = Resource(
    leak="main-heap-leak",
    is_of_objects=True,
    grows="{process} keeps taking host memory: {rise} so far, {slope}/s{per_step}.",
    unconfirmed=_READ_TOO_SELDOM,
    leak_advice=advise(
        text="Look for what keeps a reference per step: losses, outputs or hidden states kept with their graph "
        "(use .item() or .detach()), slices of large tensors (use .clone()), metrics without reset(), figures "
        "without close(), exceptions, itertools.cycle over a loader, hooks that store activations, lists, "
        "caches and queues without bound, create_graph=True",
        expected="the growth of {slope}/s stops",
    ),
)
#: The heap of a process that computes batches and steps no optimizer.
HEAP_OF_OUTPUTS = replace(
    HEAP,
    leak_advice=advise(
        text="Look for what keeps the outputs of each batch: a list of results grows with the dataset; write "
        "them to a file as they come, or into one array of their final size (np.memmap). Else look for caches "
        "without bound",
        expected="the growth of {slope}/s stops",
    ),
)
_KEEPING = (
    "what keeps references: lists and dicts that grow, caches without bound, queues that fill faster than they are "
    "emptied"
)
#: The heap of a process without batches, optimizer steps or forward passes.
HEAP_WITHOUT_ITERATIONS = replace(
    HEAP, leak_advice=advise(text=f"Look for {_KEEPING}", expected="the growth of {slope}/s stops")
)
#: The heap of a process before the first iteration of the run: its data may be as large.
HEAP_BEFORE_ITERATIONS = replace(
    HEAP,
    leak_advice=advise(
        text=f"If it should not load that much, look for {_KEEPING}", expected="the growth of {slope}/s stops"
    ),
)
#: Processes that get more and more, none of which grows.
LASTING_PROCESSES = Resource(
    leak="main-heap-leak",
    grows="The training starts processes that do not end: {count} more so far hold {rise}, {slope}/s{per_step}.",
    leak_advice=advise(
        text="Look for what starts processes and does not end them: subprocess.Popen without wait() or "
        "terminate(), a multiprocessing Pool or Manager that is made again without a `with` block",
        expected="the growth of {slope}/s stops",
    ),
)
#: The heap of a process whose growth is pinned memory in use: PyTorch's own gauge of it grows as much.
HEAP_OF_PINNED = replace(
    HEAP,
    grows="{process} keeps pinned host memory in use: {rise} so far, {slope}/s{per_step}.",
    leak_advice=advise(
        text="Look for what keeps pinned tensors: buffers that each step makes with pin_memory(), or batches "
        "of a loader with pin_memory=True. Make a few buffers before the loop, and copy into them",
        expected="the growth of {slope}/s stops",
    ),
)
#: Advice on a leak of a process whose threads get more and more.
END_THREADS = Advice(
    text="Look for threads that never end: their number rose by {count}. Join each, or give the work to one "
    "concurrent.futures.ThreadPoolExecutor",
    expected="what their functions hold, their stacks and their parts of the heap are freed",
)
#: Advice on a leak of a process that compiles again while it grows.
COMPILE_ONCE = Advice(
    text="Look first for what makes torch.compile compile a function again (TORCH_LOGS=recompiles prints each "
    "reason): the code of each compilation stays",
    expected="no compilation adds code any more",
)
WORKER_HEAP = Resource(
    leak="worker-heap-leak",
    grows="{subject} of loader {loader} {keep} taking memory: {rise} so far, {slope}/s.{most}",
    unconfirmed=_READ_TOO_SELDOM,
    leak_advice=advise(
        text="Look for a cache in the dataset (`__getitem__` that stores what it read, lru_cache without bound), "
        "and for a reader or connection that is opened for each sample and stays open",
        expected="the growth of {slope}/s stops",
    ),
)
#: Further advice on workers that outlive the epoch.
END_WORKERS = Advice(
    text="Until then, set persistent_workers=False, which ends the workers after each epoch",
    expected="their memory is freed after each epoch, at the cost of starting them again",
)
#: The heap of workers that end with each epoch, after as much growth in each.
WORKER_HEAP_OF_AN_EPOCH = replace(
    WORKER_HEAP,
    grows="{subject} of loader {loader} took memory during each epoch, {rise} at most, and freed it at the end of "
    "the epoch.",
    leak_advice=advise(
        text="If an epoch needs too much memory, look for a cache in the dataset (`__getitem__` that stores "
        "what it read, lru_cache without bound)",
        expected="the growth of {slope}/s stops",
    ),
)
#: Pages that forked workers copy from their parent by touching reference counts. It ends when all are copied.
COPIED_PAGES = Resource(
    leak="copy-on-read-growth",
    grows="The forked workers of loader {loader} copy their parent's Python objects by reading them: {per_worker} "
    "per worker so far. Their resident size does not show it. {workers} can reach {plateau}.",
    leak_advice=(
        Advice(
            text="Hold the dataset's index in tensors or numpy arrays instead of lists and dicts of Python "
            "objects, in a memory-mapped file or Arrow, or as one serialised buffer with offsets",
            expected="the workers share it: {copied} is saved now, up to {plateau} later",
        ),
        Advice(text="Until then, use fewer workers", expected="each worker removed saves up to {worker_less}"),
    ),
)
TENSORS = Resource(
    leak="gpu-tensor-leak",
    is_of_objects=True,
    grows="Live tensors on GPU {device} of pid {pid} keep growing: {rise} so far, {slope}/s{per_step}.",
    unconfirmed="Tensors on GPU {device} of pid {pid} hold {rise} more than before, but their number does not grow "
    "or is not known. Larger batches explain that, or one tensor that is created again, larger each time: "
    "torch.cat of predictions, a metric's state without reset(), a cache of keys and values.",
    leak_advice=advise(
        text="Look for what keeps a tensor per step: losses or outputs kept with their graph (use .item() or "
        ".detach()), hooks that store activations, metrics that gather on the GPU, exceptions kept with their "
        "traceback, caches without bound",
        expected="allocated memory stops growing",
    ),
    confidence=0.95,
)
#: Tensors that are kept one or two at a time. The backward pass frees what a graph saved, and leaves its tensors.
SINGLE_TENSORS = replace(
    TENSORS,
    leak_advice=advise(
        text="Look for what keeps one or two tensors at a time, fewer than a graph with its activations: outputs, "
        "hidden states or predictions in a list, a cache or a metric without reset (keep .item() or a copy on the "
        "CPU; .detach() alone frees nothing), slices of larger ones (use .clone()), exceptions kept with their "
        "traceback",
        expected="allocated memory stops growing",
    ),
)
FRAGMENTATION = Resource(
    leak="gpu-fragmentation",
    grows="PyTorch's allocator on GPU {device} (pid {pid}) keeps reserving memory that no tensor uses: {rise} "
    "more, in pieces that do not fit the requests.",
    leak_advice=(
        Advice(
            text="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; if it is set, max_split_size_mb instead",
            expected="the unused memory is one piece and can be used",
        ),
        Advice(
            text="Repeat sizes: pad batches to a few lengths, and allocate long-lived tensors before the training",
            expected="freed blocks are used again",
            effect="changes memory",
        ),
    ),
)
#: Unused memory in private pools: a pool lasts as long as its CUDA graphs or its MemPool, and serves only them.
PRIVATE_POOLS = replace(
    FRAGMENTATION,
    grows="PyTorch's allocator on GPU {device} (pid {pid}) keeps reserving memory in private pools (of CUDA "
    "graphs or of torch.cuda.MemPool): {rise} more that nothing else can use.",
    leak_advice=(
        Advice(
            text="Capture one graph per shape and replay that: pad batches to a few shapes, and let go of graphs "
            "that are not replayed again (torch.compile with mode='reduce-overhead' captures one per shape)",
            expected="the pools grow only to the number of shapes",
        ),
        Advice(
            text="Capture graphs that never run at the same time in one pool: "
            "torch.cuda.graph(graph, pool=first_graph.pool())",
            expected="they use the same memory in turn",
            effect="changes memory",
        ),
        Advice(
            text="If the script makes pools itself, use one torch.cuda.MemPool again and again, or let go of it",
            expected="freed blocks of a pool are used again, and a pool that nothing refers to is given back",
        ),
    ),
)
PINNED_CACHE = Resource(
    leak="pinned-cache-growth",
    grows="Unused pinned host memory keeps growing (pid {pid}): {rise} more, cached and never freed.",
    unconfirmed="{grows} The resident memory of the process does not show it.",
    leak_advice=(
        Advice(
            text="Give pinned batches the same size: the cache rounds up to powers of two and frees nothing",
            expected="freed buffers are used again",
            effect="changes memory",
        ),
        Advice(
            text="Keep fewer pinned copies in flight: lower prefetch_factor, or synchronise before the next "
            "non_blocking copy",
            expected="the cache grows only to what is in use at the same time",
        ),
    ),
)
#: The same where PyTorch does not report how much of it is in use.
PINNED_MEMORY = replace(
    PINNED_CACHE,
    grows="Pinned host memory keeps growing (pid {pid}): {rise} more. How much of it is in use is not known.",
    leak_advice=(
        *PINNED_CACHE.leak_advice,
        Advice(
            text="Look for what keeps pinned batches: lists of them, or of tensors from pin_memory()",
            expected="their memory is used again",
        ),
    ),
)
OUTSIDE_PYTORCH = Resource(
    leak="gpu-non-pytorch-growth",
    grows="GPU {device}: memory outside PyTorch keeps growing in the run's processes: {rise} so far, {slope}/s.",
    unconfirmed="{grows} The device as a whole does not show it.",
    leak_advice=advise(
        text="Look at what takes CUDA memory without PyTorch: NCCL communicators and streams that are created "
        "again, CUDA extensions, other libraries (CuPy, DALI, RAPIDS) without a bound on their pools",
        expected="the driver's count grows only with what PyTorch reserves",
    ),
)
#: The same on a device for which the driver does not report the use of each process.
UNATTRIBUTED = replace(
    OUTSIDE_PYTORCH,
    unconfirmed="GPU {device}: memory outside PyTorch grew by {rise}. The driver does not report the processes "
    "that use it: the run's libraries or another job.",
)
#: Memory of the run's processes whose allocator is not recorded: there it may be PyTorch's.
UNRECORDED = replace(
    OUTSIDE_PYTORCH,
    grows="GPU {device}: processes of the run that take no steps, such as DataLoader workers that use CUDA, keep "
    "taking memory: {rise} so far, {slope}/s.",
    unconfirmed="{grows} Tensors or a library: the allocators of these processes are not recorded.",
)
_FIX_HOST_GROWTH = Advice(text="Fix the growth (see the leak findings)", expected="demand stops growing")
_FIX_GPU_GROWTH = replace(_FIX_HOST_GROWTH, text="Fix the growth (see the gpu findings)")
#: Advice -> the same for a run that does nothing before a limit is met.
WITH_CHECKPOINT = {
    advice: replace(
        advice,
        text=f"{advice.text}. To save a checkpoint in time, handle SIGUSR1 in the script and start it with "
        "`tidegauge run --before-oom SIGUSR1 -- COMMAND`",
    )
    for advice in (_FIX_HOST_GROWTH, _FIX_GPU_GROWTH)
}
#: Advice that does not fit growth which ends by itself.
FIX_GROWTH = frozenset((*WITH_CHECKPOINT, *WITH_CHECKPOINT.values()))
_RAISE_LIMIT = Advice(text="Raise the memory limit of the job", expected="the peak fits")
HOST_MEMORY = Resource(
    risk="host-oom-risk",
    risk_advice=(
        _FIX_HOST_GROWTH,
        Advice(
            text="Use fewer workers or a smaller prefetch_factor",
            expected="each worker removed frees its private memory and prefetched batches",
        ),
    ),
    max_headroom_ratio=20.0,  # other programs on the host and warm-up rise too
    full="Host memory {verb} nearly full: {used} of {named_limit} at the peak, page cache not counted.",
    full_advice=(
        Advice(
            text="Lower num_workers, prefetch_factor or the memory of the dataset",
            expected="the peak stays below the limit",
        ),
        _RAISE_LIMIT,
    ),
)
#: Further advice where most of the growth is freed memory that the C library keeps.
GIVE_BACK_FREED = Advice(
    text="Set MALLOC_MMAP_THRESHOLD_=1048576 in the environment of the training (glibc)",
    expected="blocks of 1 MiB and more go back to the system when they are freed",
    effect="changes memory",
)
#: Host memory where no DataLoader worker ran.
HOST_MEMORY_WITHOUT_WORKERS = replace(
    HOST_MEMORY,
    risk_advice=(_FIX_HOST_GROWTH,),
    full_advice=(
        Advice(text="Hold less memory in the training process", expected="the peak stays below the limit"),
        _RAISE_LIMIT,
    ),
)
#: Host memory before the first iteration of the run: what grows may be its data.
HOST_MEMORY_OF_LOADING = replace(HOST_MEMORY_WITHOUT_WORKERS, risk_advice=HOST_MEMORY_WITHOUT_WORKERS.full_advice)
LOOK_ELSEWHERE = Advice(
    text="Look what else holds memory there: other programs (`top -o RES`), files in /dev/shm or another tmpfs "
    "(`df -h -t tmpfs`)",
    expected="their memory becomes free",
)
#: Host memory of which other programs take more than the run.
HOST_MEMORY_OF_OTHERS = replace(HOST_MEMORY, risk_advice=(LOOK_ELSEWHERE, _RAISE_LIMIT))
_GPU_ADVICE = (
    _FIX_GPU_GROWTH,
    Advice(
        text="Make a step smaller: a smaller batch with gradient accumulation (`tidegauge tune --batch-size -- "
        "COMMAND` finds the largest that fits), activation checkpointing, bfloat16",
        expected="activations shrink in proportion to the batch",
        effect="changes results",
    ),
)
GPU_MEMORY = Resource(
    risk="gpu-oom-risk",
    risk_advice=_GPU_ADVICE,
    full="In {steps} steps GPU {device} had no memory left until PyTorch released its cache: {used} of {limit} "
    "were in use at the peak.",
    full_advice=_GPU_ADVICE[1:],
)
#: A GPU that is full only because of cache that no tensor used, even at the peak.
GPU_FULL_OF_CACHE = replace(GPU_MEMORY, full_advice=(FRAGMENTATION.leak_advice[0], *GPU_MEMORY.full_advice))
#: A GPU that would not be full without the processes outside the run.
GPU_FULL_OF_OTHERS = replace(
    GPU_MEMORY,
    full=f"{GPU_MEMORY.full} Processes outside the run held {{others}} of it.",
    full_advice=(
        Advice(
            text="End the other processes on this GPU, or run this training on another one (`nvidia-smi` names "
            "the processes)",
            expected="their memory becomes free",
        ),
        *GPU_MEMORY.full_advice,
    ),
)
#: A GPU that would not be full without the processes of the run that record no allocator.
GPU_FULL_OF_UNRECORDED = replace(
    GPU_MEMORY,
    full=f"{GPU_MEMORY.full} Processes of the run that take no steps held {{unrecorded}} of it.",
    full_advice=(
        Advice(
            text="Take the work of these processes off this GPU (`nvidia-smi` names them). In DataLoader workers, "
            "make tensors on the CPU, and move batches to the device in the training process",
            expected="their memory becomes free",
        ),
        *GPU_MEMORY.full_advice,
    ),
)
#: The memory of a GPU on which other programs grow.
GPU_OF_OTHERS = replace(
    GPU_MEMORY,
    risk_advice=advise(
        text="End the growing processes on this GPU, or run this training on another one (`nvidia-smi` names "
        "the processes)",
        expected="the run has the GPU's memory to itself",
    ),
)
#: The memory of a GPU where neither PyTorch grows nor a process is known that does.
GPU_UNATTRIBUTED = replace(
    GPU_MEMORY,
    risk_advice=(
        Advice(
            text="Find the process that grows: `nvidia-smi` outside the container names them. End another job, or "
            "look in this one for a library that takes CUDA memory without PyTorch",
            expected="demand stops growing",
        ),
        *_GPU_ADVICE[1:],
    ),
)
#: The memory of a GPU that the run uses without records of PyTorch's allocator.
GPU_WITHOUT_RECORDS = replace(
    GPU_MEMORY,
    risk_advice=advise(
        text="Start the training with `tidegauge run`, which reads PyTorch's allocator too",
        expected="the report says whether tensors, the cache or a library grow",
    ),
)
#: The memory of a GPU on which processes of the run grow that record no allocator.
GPU_OF_UNRECORDED = replace(
    GPU_MEMORY,
    risk_advice=advise(
        text="Look for what keeps tensors in the run's processes that take no steps (`nvidia-smi` shows the memory "
        "of each). In DataLoader workers, make tensors on the CPU, and move batches to the device in the training "
        "process",
        expected="the memory of these processes stops growing",
    ),
)
_SHM_ROOM = Advice(
    text="Give /dev/shm more room (docker: --shm-size=8g, Kubernetes: an emptyDir of medium Memory there)",
    expected="the batches in flight fit",
    effect="changes memory",
)
_SHM_HOLDERS = Advice(
    text="List the segments and the processes that hold them with `ls -l /dev/shm` and `lsof +L1 /dev/shm`. Call "
    "close() and unlink() on segments, and keep batches from workers as .clone()",
    expected="the use of /dev/shm stops growing",
)
SHARED_MEMORY = Resource(
    leak="shm-leak",
    grows="/dev/shm keeps filling: {rise} so far, {slope}/s.{remark}",
    leak_advice=(_SHM_HOLDERS,),
    risk="shm-exhaustion-risk",
    risk_advice=(_SHM_HOLDERS, replace(_SHM_ROOM, expected="it is full later, in proportion to its size")),
    max_headroom_ratio=20.0,  # other programs on the host fill it too
    full="/dev/shm had {free} left of {limit} at the peak, and each of {workers} workers hands over batches of "
    "{batch}. A process that finds /dev/shm full fails or dies of SIGBUS.",
    full_advice=(
        _SHM_ROOM,
        Advice(
            text="Lower num_workers or prefetch_factor",
            expected="/dev/shm holds num_workers * prefetch_factor batches at a time",
        ),
    ),
)
_FILES_ADVICE = (
    Advice(
        text="List the open files in /proc/PID/fd, and open those of each step or item in a `with` block. Those in "
        "/dev/shm named torch_* are tensors that came from workers: do not keep them, but .clone() or numbers",
        expected="the count stops growing",
    ),
    Advice(
        text="Until then, raise the limit with `ulimit -n` before the training",
        expected="the training lasts longer, in proportion to the limit",
    ),
)
OPEN_FILES = Resource(
    leak="fd-leak",
    grows="{process} keeps opening files: {rise} more so far, {slope}/s.",
    unconfirmed="{grows} Neither the limit nor the steps are known, so nothing confirms it.",
    leak_advice=_FILES_ADVICE,
    risk="fd-exhaustion-risk",
    risk_advice=_FILES_ADVICE,
    full="{process} has {used} of at most {limit} files open.",
    full_advice=_FILES_ADVICE,
)
_CLONE = Advice(
    text="Do not keep batches that came from workers, in a list or by itertools.cycle over the loader: keep "
    "numbers, and a .clone() of what must stay, or share them by "
    'torch.multiprocessing.set_sharing_strategy("file_system")',
    expected="the descriptor of each tensor is closed with its batch",
)
#: Open files of a process that keeps batches from its workers: each tensor in shared memory has a descriptor.
OPEN_BATCHES = replace(
    OPEN_FILES,
    grows="{process} keeps tensors in shared memory, such as batches from its workers: {rise} more open files so "
    "far, {slope}/s.",
    leak_advice=(_CLONE, *_FILES_ADVICE),
    risk_advice=(_CLONE, *_FILES_ADVICE),
)
_END_ITERATORS = Advice(
    text="Do not keep iterators of a DataLoader, or a DataLoader with persistent workers that is made again, in a "
    "list, an attribute or an open generator: let go of each before the next one is made",
    expected="the workers of an epoch end with it, and free their memory and descriptors",
)
#: Open files of a process that keeps iterators, and with each its workers, their pipes and their memory.
OPEN_WORKERS = replace(
    OPEN_FILES,
    grows=f"{OPEN_FILES.grows} {{workers}} workers of earlier iterators still live.",
    leak_advice=(_END_ITERATORS,),
    risk_advice=(_END_ITERATORS,),
)
