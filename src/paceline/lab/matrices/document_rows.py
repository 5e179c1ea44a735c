"""WHAT do the documents have? Every program, command line, printed line and figure, with its line and how it is judged.

Used by lab/matrices/documents. Pure data: a row names the run that shows it, or why it cannot be had here. Claims in
prose are not here. A time is judged as a multiple of the single process's on the same side, for the documents'
machines are gone.
"""

from enum import Enum

import msgspec

from paceline.lab.matrices import document_times
from paceline.lab.matrices.document_times import Times
from paceline.lab.matrices.looks import SINGLE, Ended, EpochTime, Look, Number, Prints, Shares


class Kind(Enum):
    PROGRAM = "program"
    COMMAND = "command"
    PRINTED = "printed"
    FIGURE = "figure"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a document has."""

    at: str  # document:line, or document:first-last
    kind: Kind
    said: str  # in the document's words, cut short
    run: str = ""  # what shows it; "": nothing can
    run_theirs: str = ""  # TensorFlow's is another one
    look: Look | None = None
    theirs: Look | None = None  # TensorFlow's line reads otherwise
    why: str = ""  # not here, or how it differs here
    is_partial: bool = False  # what runs here is not all of it, as `why` says: shown, and not marked


OFF = 0.03  # of an accuracy, from one seed; six seeds of one process differ by 0.013
TWO_GPUS_S = document_times.ASYNC_TWO_GPUS.epoch_s
SINGLE_S = document_times.SINGLE.epoch_s[0]
ONE_HOST = "on one host, there on two"
NO_GPU = "no GPU here"
FOUR_GPUS = "no GPU here: soft placement puts it on the CPU"
NO_MORE = "TensorFlow 2.21 prints no such line"
ALONE, ONE, ASYNC, SYNC = "single process", "1 ps + 1 worker", "1 ps + 2 workers, async", "1 ps + 2 workers, sync"
ASYNC_2, SYNC_2, THREE = "2 ps + 2 workers, async", "2 ps + 2 workers, sync", "1 ps + 3 workers, async"
SHARED, TWO_FLAGS, IN_GRAPH = "10,000 shared steps", "two flags and settings.py", "in-graph"
LOCAL, BOTH, PINNED, PLACEMENT = "hello local", "hello first and second", "hello pinned", "placement"


def program(at: str, said: str, run: str, why: str = "") -> Row:
    return Row(at=at, kind=Kind.PROGRAM, said=said, run=run, look=Ended(), why=why)


def command(at: str, said: str, run: str, why: str = "") -> Row:
    return Row(at=at, kind=Kind.COMMAND, said=said, run=run, look=Ended(), why=why, is_partial=bool(why))


def printed(at: str, said: str, run: str, ours: Look, theirs: Look | None = None, why: str = "") -> Row:
    is_partial = why in (NO_GPU, FOUR_GPUS)
    return Row(at=at, kind=Kind.PRINTED, said=said, run=run, look=ours, theirs=theirs, why=why, is_partial=is_partial)


def accuracy(at: str, run: str, task: str, value: float, why: str = "") -> Row:
    look = Number(task, r"Test-Accuracy: (\d\.\d+)", value - OFF, value + OFF)
    return Row(at=at, kind=Kind.FIGURE, said=f"{task}: accuracy {value:g}", run=run, look=look, why=why)


def epoch(at: str, run: str, task: str, seconds: float, why: str = "") -> Row:
    said = f"{task}: epoch {seconds:g} s, {seconds / SINGLE_S:.2f}x"
    return Row(
        at=at,
        kind=Kind.FIGURE,
        said=said,
        run=run,
        look=EpochTime(task, seconds / SINGLE_S),
        why=why,
        is_partial=bool(why),
    )


def first(at: str, run: str, task: str, seconds: float, later_s: float, why: str = "") -> Row:
    said = f"{task}: first epoch {seconds:g} s, {seconds / later_s:.1f}x its others"
    look = EpochTime(task, seconds / later_s, is_first=True)
    return Row(at=at, kind=Kind.FIGURE, said=said, run=run, look=look, why=why, is_partial=bool(why))


def timed(at: str, run: str, times: Times, worker: int, why: str = "") -> list[Row]:
    """A worker's first epoch, where the document has it, and its others."""
    task, later_s = WORKERS[worker], times.epoch_s[worker]
    early = [first(at, run, task, times.first_s[worker], later_s, why)] if times.first_s else []
    return [*early, epoch(at, run, task, later_s, why)]


def absent(at: str, kind: Kind, said: str, why: str) -> Row:
    return Row(at=at, kind=kind, said=said, why=why)


def started(job: str, index: int) -> str:
    return f"python … --job_name={job} --task_index={index}"


W0, W1, W2 = WORKERS = "worker-0", "worker-1", "worker-2"
DOCUMENT_000 = (
    program("000:11", "tfsingle.py", ALONE),
    absent("000:13", Kind.FIGURE, "on /gpu:0", NO_GPU),
    Row(
        at="000:15",
        kind=Kind.FIGURE,
        said=f"epoch {SINGLE_S:g} s",
        run=ALONE,
        look=Prints(SINGLE, r"^Epoch \d+: .* s$"),
        why="the unit of all epoch times below",
    ),
    accuracy("000:15", ALONE, SINGLE, 0.72),
    program("000:17", "tfdist_between.py", ONE),
    program("000:26-31", "settings.py", TWO_FLAGS),
    command("000:34", started("ps", 0), ONE),
    command("000:35", started("worker", 0), ONE),
    *timed("000:38", ONE, document_times.ONE, 0),
    accuracy("000:38", ONE, W0, 0.72),
    program("000:44-47", "settings.py with two workers", ASYNC),
    Row(
        at="000:52-54",
        kind=Kind.PROGRAM,
        said="ConfigProto, allow_growth, Server(config=…)",
        run=ASYNC,
        look=Ended("--allow-growth, on by default"),
        theirs=Ended(),
    ),
    command("000:58", started("ps", 0), ASYNC),
    command("000:59", started("worker", 0), ASYNC),
    command("000:60", started("worker", 1), ASYNC),
    *timed("000:65", ASYNC, document_times.ASYNC, 0),
    accuracy("000:66", ASYNC, W0, 0.80),
    *timed("000:67", ASYNC, document_times.ASYNC, 1),
    accuracy("000:68", ASYNC, W1, 0.80),
    absent("000:79-85", Kind.FIGURE, "GPUs used 17 % and 0 %", NO_GPU),
    absent("000:93-94", Kind.PROGRAM, "worker_device with /gpu:%d", f"{NO_GPU}; ours: --worker-device"),
    absent("000:97", Kind.FIGURE, f"epoch {' s and '.join(map(str, TWO_GPUS_S))} s on two GPUs", NO_GPU),
    absent("000:106-112", Kind.FIGURE, "GPUs used 8 % and 3 %", NO_GPU),
    program("000:117-133", "tfdist_between_sync.py", SYNC),
    command("000:136", started("ps", 0), SYNC),
    command("000:137", started("worker", 0), SYNC),
    command("000:138", started("worker", 1), SYNC),
    *timed("000:143", SYNC, document_times.SYNC, 0),
    *timed("000:143", SYNC, document_times.SYNC, 1),
    accuracy("000:144", SYNC, W0, 0.72),
    accuracy("000:144", SYNC, W1, 0.72),
    absent("000:155-161", Kind.FIGURE, "GPUs used 6 % and 4 %", NO_GPU),
    program("000:166-169", "settings.py with two ps", ASYNC_2),
    command("000:172", started("ps", 0), ASYNC_2),
    command("000:173", started("ps", 1), ASYNC_2),
    command("000:174", started("worker", 0), ASYNC_2),
    command("000:175", started("worker", 1), ASYNC_2),
    *timed("000:180", ASYNC_2, document_times.ASYNC_TWO_PS, 0),
    *timed("000:180", ASYNC_2, document_times.ASYNC_TWO_PS, 1),
    accuracy("000:181", ASYNC_2, W0, 0.80),
    accuracy("000:181", ASYNC_2, W1, 0.80),
    command("000:195", started("ps", 0), SYNC_2),
    command("000:196", started("ps", 1), SYNC_2),
    command("000:197", started("worker", 0), SYNC_2),
    command("000:198", started("worker", 1), SYNC_2),
    *timed("000:203", SYNC_2, document_times.SYNC_TWO_PS, 0),
    *timed("000:203", SYNC_2, document_times.SYNC_TWO_PS, 1),
    accuracy("000:204", SYNC_2, W0, 0.72),
    accuracy("000:204", SYNC_2, W1, 0.72),
    command("000:218", started("ps", 0), ASYNC, ONE_HOST),
    command("000:219", started("worker", 0), ASYNC, ONE_HOST),
    command("000:222", started("worker", 1), ASYNC, ONE_HOST),
    *timed("000:225", ASYNC, document_times.ASYNC_TWO_HOSTS, 0, ONE_HOST),
    *timed("000:226", ASYNC, document_times.ASYNC_TWO_HOSTS, 1, ONE_HOST),
    accuracy("000:227", ASYNC, W0, 0.78, ONE_HOST),
    accuracy("000:227", ASYNC, W1, 0.80, ONE_HOST),
    command("000:241", started("ps", 0), THREE, ONE_HOST),
    command("000:242", started("worker", 0), THREE, ONE_HOST),
    command("000:243", started("worker", 1), THREE, ONE_HOST),
    command("000:246", started("worker", 2), THREE, ONE_HOST),
    *timed("000:249", THREE, document_times.ASYNC_THREE, 0, ONE_HOST),
    *timed("000:250", THREE, document_times.ASYNC_THREE, 1, ONE_HOST),
    *timed("000:251", THREE, document_times.ASYNC_THREE, 2, ONE_HOST),
    accuracy("000:252", THREE, W0, 0.82, ONE_HOST),
    accuracy("000:252", THREE, W1, 0.83, ONE_HOST),
    accuracy("000:252", THREE, W2, 0.83, ONE_HOST),
    program("000:261", "IN GRAPH (given up there)", IN_GRAPH),
)

CUDA = "no GPU here; ours divides what it names over the workers"
DOCUMENT_001 = (
    absent("001:61-63", Kind.PROGRAM, "ConfigProto's three options", "no program; see 001:84, and docs/tensorflow.md"),
    absent("001:69-70", Kind.COMMAND, "CUDA_VISIBLE_DEVICES=0,1", CUDA),
    absent("001:74-75", Kind.PROGRAM, "os.environ['CUDA_VISIBLE_DEVICES']", CUDA),
    program("001:84-97", "two products on two GPUs, their sum on the CPU", PLACEMENT, FOUR_GPUS),
    printed(
        "001:103-111",
        "Device mapping: … four Tesla K20m",
        PLACEMENT,
        Prints("placement", r"Device mapping: no known devices\.$"),
        why=NO_GPU,
    ),
    *(
        printed(
            f"001:{line}",
            f"{name}: /job:localhost/…/{device}",
            PLACEMENT,
            Prints("placement", rf"{name}: \({kind}\): /job:localhost/replica:0/task:0/device:CPU:0"),
            why=FOUR_GPUS if "GPU" in device else "",
        )
        for line, name, kind, device in (
            (112, "Const_3", "Const", "device:GPU:3"),
            (113, "Const_2", "Const", "device:GPU:3"),
            (114, "MatMul_1", "MatMul", "device:GPU:3"),
            (115, "Const_1", "Const", "device:GPU:2"),
            (116, "Const", "Const", "device:GPU:2"),
            (117, "MatMul", "MatMul", "device:GPU:2"),
            (118, "AddN", "AddN", "cpu:0"),
        )
    ),
    printed(
        "001:119-120",
        "[[  44.   56.] [  98.  128.]]",
        PLACEMENT,
        Prints("placement", r"\[\[ *44\. +56\.\]", (r"\[ *98\. +128\.\]\]",)),
    ),
    absent("001:128", Kind.FIGURE, "cifar10 uses several GPUs very little", NO_GPU),
    absent("001:137", Kind.FIGURE, "two GPUs more than three times faster", NO_GPU),
)

DOCKER = "without its container, for which there is no engine here; ours: paceline emit docker"
STEP = r"^\d+\.\d+: Worker {}: trai\w+ step \d+ do\w+ \(global step: ?\d+\)"
ELAPSED = r"Training elapsed time: ?(\d+\.\d+) s"
VALIDATION = r"After \d+ training step\(s\), validation cross entropy = (\d+(?:\.\d+)?(?:e\+\d+)?)"
ONE_PROCESS = (829.0, 1344.0)  # where a single process is after 9,500 to 10,000 steps, eight seeds


def node(worker: int, steps: str, ends: int, elapsed_s: float, entropy: float) -> tuple[Row, ...]:
    """What document 002 prints of one worker."""
    task = f"worker-{worker}"
    low, high = ONE_PROCESS
    step = Prints(task, STEP.format(worker))
    return (
        printed(f"002:{steps}", f"…: Worker {worker}: traing step … dome (global step:…)", SHARED, step),
        printed(f"002:{ends}", "Training ends @ …", SHARED, Prints(task, r"Training ends @ \d+\.\d+")),
        Row(
            at=f"002:{ends + 1}",
            kind=Kind.FIGURE,
            said=f"Training elapsed time:{elapsed_s:g} s",
            run=SHARED,
            look=Number(task, ELAPSED, 0, elapsed_s),
        ),
        Row(
            at=f"002:{ends + 2}",
            kind=Kind.FIGURE,
            said=f"validation cross entropy = {entropy:g}",
            run=SHARED,
            look=Number(task, VALIDATION, low, high),
        ),
    )


DOCUMENT_002 = (
    *(
        Row(
            at=f"002:{line}",
            kind=Kind.COMMAND,
            said=f"nvidia-docker … python distributed.py, {task}, four flags",
            run=SHARED,
            look=Ended(),
            why=DOCKER,
            is_partial=True,
        )
        for line, task in ((4, "ps 0"), (6, "worker 0"), (8, "worker 1"))
    ),
    *node(0, "15-48", 49, 366.604071, 1147.88),
    *node(1, "57-86", 87, 366.428102, 1122.46),
    Row(
        at="002:48,86",
        kind=Kind.FIGURE,
        said="8087 + 1916 steps",
        run=SHARED,
        look=Shares(3.5, 5.0),
        why="worker 1 is slowed 4.2 times",
    ),
    absent("002:94-95", Kind.PRINTED, "h5py: FutureWarning", "a warning of Python 2.7's h5py"),
    absent("002:96-103", Kind.PRINTED, "Successfully downloaded … Extracting …", "MNIST is embedded"),
    printed("002:104", "job_name : ps", SHARED, Prints("ps-0", r"^job_name : ps$")),
    printed("002:105", "task_index : 0", SHARED, Prints("ps-0", r"^task_index : 0$")),
    Row(
        at="002:106",
        kind=Kind.PRINTED,
        said="cpu_feature_guard … AVX2 FMA",
        run=SHARED,
        theirs=Prints("ps-0", r"cpu_feature_guard|CPU instructions"),
        why="TensorFlow's own",
    ),
    printed(
        "002:107",
        "Initialize GrpcChannelCache for job ps -> {0 -> …}",
        SHARED,
        Prints("ps-0", r"^Cluster: job ps -> \{0 -> "),
        Prints("ps-0", r"GrpcChannelCache for job ps -> \{0 -> "),
        why=NO_MORE,
    ),
    printed(
        "002:108",
        "Initialize GrpcChannelCache for job worker -> {0 -> …, 1 -> …}",
        SHARED,
        Prints("ps-0", r"^Cluster: job worker -> \{0 -> .*, 1 -> "),
        Prints("ps-0", r"GrpcChannelCache for job worker -> \{0 -> .*, 1 -> "),
        why=NO_MORE,
    ),
    printed(
        "002:109",
        "Started server with target: grpc://localhost:2222",
        SHARED,
        Prints("ps-0", r"^Started server with target: paceline://"),
        Prints("ps-0", r"Started server with target: grpc://"),
    ),
    command("002:117", "python distributed.py --job_name=ps --task_index=0", TWO_FLAGS),
    command("002:123", "python distributed.py --job_name=worker --task_index=0", TWO_FLAGS),
    command("002:129", "python distributed.py --job_name=worker --task_index=1", TWO_FLAGS),
    absent("002:134,136,143", Kind.FIGURE, "three pictures", "not in the text"),
    program("002:209", 'tf.device("/job:worker/task:n")', IN_GRAPH),
)

BLOCK = "ours: with paceline.tf1; TensorFlow's: in tfdist_between.py, 1 ps + 1 worker"


def block(at: str, said: str) -> Row:
    return Row(at=at, kind=Kind.PROGRAM, said=said, run="Supervisor", run_theirs=ONE, look=Ended(), why=BLOCK)


DOCUMENT_003 = (
    block("003:32-44", "ClusterSpec, app.flags, Server"),
    block("003:50-56", "server.join, replica_device_setter"),
    block("003:62-65", "Supervisor, prepare_or_wait_for_session"),
    command("003:86", 'python $1 --job_name="ps" --task_index=0', TWO_FLAGS),
    command("003:87", 'python $1 --job_name="worker" --task_index=0', TWO_FLAGS),
    command("003:100", 'python $1 --job_name="worker" --task_index=1', TWO_FLAGS),
    program("003:107", "AutoEncoder", "autoencoder"),
    program("003:107", "Transformer", "spatial transformer"),
    absent("003:113", Kind.FIGURE, "CPU and network of every server", "left out of the document itself"),
)

SESSION = r"Start master session [0-9a-f]{16} with config:"
TASK_0, TASK_1 = r"/job:local/replica:0/task:0", r"/job:local/replica:0/task:1"
ON_TASK_1 = "TensorFlow 2.21 runs it on task 1"
CACHE = "Initialize GrpcChannelCache for job local -> {…}"
DOCUMENT_004 = (
    program("004:38-46", "create_local_server, Session, run", LOCAL),
    printed(
        "004:51",
        CACHE,
        LOCAL,
        Prints("hello_local", r"^Cluster: job local -> \{0 -> localhost:\d+\}$"),
        Prints("hello_local", r"GrpcChannelCache for job local"),
        why=NO_MORE,
    ),
    printed(
        "004:52",
        "Started server with target: grpc://localhost:14401",
        LOCAL,
        Prints("hello_local", r"^Started server with target: paceline://localhost:\d+$"),
        Prints("hello_local", r"Started server with target: grpc://localhost:\d+"),
    ),
    printed("004:53", "Start master session … with config:", LOCAL, Prints("hello_local", SESSION), why=NO_MORE),
    program("004:68-79", "First", BOTH),
    program("004:84-95", "Second", BOTH),
    printed(
        "004:101",
        CACHE,
        BOTH,
        Prints("hello_first", r"^Cluster: job local -> \{0 -> .*, 1 -> .*\}$"),
        Prints("hello_first", r"GrpcChannelCache for job local"),
        why=NO_MORE,
    ),
    printed("004:102", "Started server with target: …", BOTH, Prints("hello_first", "Started server with target: ")),
    printed(
        "004:103-104",
        "CreateSession still waiting for response from worker: …/task:1",
        BOTH,
        Prints("hello_first", rf"[Ss]till waiting for response from worker: {TASK_1}"),
    ),
    printed(
        "004:112",
        CACHE,
        BOTH,
        Prints("hello_second", r"^Cluster: job local -> \{0 -> .*, 1 -> .*\}$"),
        Prints("hello_second", r"GrpcChannelCache for job local"),
        why=NO_MORE,
    ),
    printed("004:113", "Started server with target: …", BOTH, Prints("hello_second", "Started server with target: ")),
    printed("004:114", "Start master session … with config:", BOTH, Prints("hello_second", SESSION), why=NO_MORE),
    printed(
        "004:118-119",
        "Const: (Const): …/task:0/cpu:0, b'Hello, distributed tensorflow 2.'",
        BOTH,
        Prints("hello_second", rf"Const: \(Const\): {TASK_0}/device:CPU:0", ("b'Hello, distributed tensorflow 2.'",)),
        why=ON_TASK_1,
    ),
    printed(
        "004:126-127",
        "Const: (Const): …/task:0/cpu:0, b'Hello, distributed tensorflow.'",
        BOTH,
        Prints("hello_first", rf"Const: \(Const\): {TASK_0}/device:CPU:0", (r"b'Hello, distributed tensorflow\.'",)),
    ),
    program("004:134-135", 'with tf.device("/job:local/task:1")', PINNED),
    printed(
        "004:140-141",
        "Const: (Const): …/task:1/cpu:0, b'Hello, distributed tensorflow.'",
        PINNED,
        Prints("hello_first", rf"Const: \(Const\): {TASK_1}/device:CPU:0", (r"b'Hello, distributed tensorflow\.'",)),
    ),
    absent("004:157", Kind.PROGRAM, "example/mnist", "not in the document; document 002's is"),
)

ROWS: tuple[Row, ...] = (*DOCUMENT_000, *DOCUMENT_001, *DOCUMENT_002, *DOCUMENT_003, *DOCUMENT_004)
