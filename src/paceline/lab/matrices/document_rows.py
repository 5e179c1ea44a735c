"""WHAT do the documents have? Every program, command line, printed line and figure, with its line and how it is judged.

Used by lab/matrices/documents. Pure data: a row names the run that shows it, or why it cannot be had here. Claims in
prose are not here. A time is judged as a multiple of the single process's on the same side, for the documents'
machines are gone.
"""

from enum import Enum

import msgspec

from paceline.lab.matrices import document_times
from paceline.lab.matrices.document_times import Times
from paceline.lab.matrices.looks import SINGLE, Ended, EpochTime, Look, Number, Prints, Says, Shares


class Kind(Enum):
    PROGRAM = "program"
    COMMAND = "command"
    PRINTED = "printed"
    FIGURE = "figure"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a document has."""

    at: str  # document:line, or document:first-last
    kind: Kind
    said: str  # in the document's words; but of printed lines cut short
    run: str = ""  # what shows it; "": nothing can
    run_theirs: str = ""  # TensorFlow's is another one
    look: Look | None = None
    theirs: Look | None = None  # TensorFlow's line reads otherwise
    why: str = ""  # not here, or how it differs here
    ours: str = ""  # why a printed line has words of ours, with --log-style tf too
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


def printed(at: str, run: str, task: str, *lines: tuple[str, str], why: str = "", ours: str = "") -> Row:
    """Lines of a document, each with the pattern that finds its place in the log of a task."""
    texts, patterns = zip(*lines, strict=True)
    look = Prints(task, texts, patterns)
    return Row(
        at=at,
        kind=Kind.PRINTED,
        said=" ".join(texts),
        run=run,
        look=look,
        why=why,
        ours=ours,
        is_partial=why == NO_GPU,
    )


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
        look=Says(SINGLE, r"^Epoch \d+: .* s$"),
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

NO_CARDS = "there are none here"
KIND = "an op's kind is said, as in document 004; without a cluster a device is written as TensorFlow 2 does"
CUDA = "no GPU here; ours divides what it names over the workers"
DOCUMENT_001 = (
    absent("001:61-63", Kind.PROGRAM, "ConfigProto's three options", "no program; see 001:84, and docs/tensorflow.md"),
    absent("001:69-70", Kind.COMMAND, "CUDA_VISIBLE_DEVICES=0,1", CUDA),
    absent("001:74-75", Kind.PROGRAM, "os.environ['CUDA_VISIBLE_DEVICES']", CUDA),
    program("001:84-97", "two products on two GPUs, their sum on the CPU", PLACEMENT, FOUR_GPUS),
    printed("001:103-111", PLACEMENT, "placement", ("Device mapping:", "Device mapping:"), why=NO_GPU, ours=NO_CARDS),
    *(
        printed(
            f"001:{line}",
            PLACEMENT,
            "placement",
            (f"{name}: /job:localhost/replica:0/task:0/{device}", f"(^| ){name}: .*/job:localhost/"),
            why=FOUR_GPUS if "GPU" in device else "",
            ours=KIND,
        )
        for line, name, device in (
            (112, "Const_3", "device:GPU:3"),
            (113, "Const_2", "device:GPU:3"),
            (114, "MatMul_1", "device:GPU:3"),
            (115, "Const_1", "device:GPU:2"),
            (116, "Const", "device:GPU:2"),
            (117, "MatMul", "device:GPU:2"),
            (118, "AddN", "cpu:0"),
        )
    ),
    printed(
        "001:119-120",
        PLACEMENT,
        "placement",
        ("[[  44.   56.]", r"\[\[ *44\. +56\.\]"),
        (" [  98.  128.]]", r"\[ *98\. +128\.\]\]"),
    ),
    absent("001:128", Kind.FIGURE, "cifar10 uses several GPUs very little", NO_GPU),
    absent("001:137", Kind.FIGURE, "two GPUs more than three times faster", NO_GPU),
)

DOCKER = "without its container, for which there is no engine here; ours: paceline emit docker"
STEP = r"Worker {}: trai\w+ step \d+ "
LOGGER = "without the date and the source file of TensorFlow's logger, as in document 004"
ELAPSED = r"Training elapsed time: ?(\d+\.\d+) s"
VALIDATION = r"After \d+ training step\(s\), validation cross entropy = (\d+(?:\.\d+)?(?:e\+\d+)?)"
ONE_PROCESS = (829.0, 1344.0)  # where a single process is after 9,500 to 10,000 steps, eight seeds


def node(worker: int, steps: str, step: str, ends: int, end: str, elapsed_s: float, entropy: float) -> tuple[Row, ...]:
    """What document 002 prints of one worker: `step` is the first of its lines."""
    task = f"worker-{worker}"
    low, high = ONE_PROCESS
    elapsed, validation = f"{elapsed_s:f} s", f"validation cross entropy = {entropy:g}"
    return (
        printed(f"002:{steps}", SHARED, task, (step, STEP.format(worker))),
        printed(f"002:{ends}", SHARED, task, (f"Training ends @ {end}", "^Training ends")),
        printed(f"002:{ends + 1}", SHARED, task, (f"Training elapsed time:{elapsed}", "^Training elapsed")),
        printed(f"002:{ends + 2}", SHARED, task, (f"After 10000 training step(s), {validation}", "^After")),
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
            said=validation,
            run=SHARED,
            look=Number(task, VALIDATION, low, high),
        ),
    )


CACHE, STARTED = "Initialize GrpcChannelCache for job", "Started server with target:"
LOGGED = "2018-04-23 12:37:55.{}: I tensorflow/core/{}]"  # the beginning of a line of TensorFlow's logger
GUARD = LOGGED.format(762710, "platform/cpu_feature_guard.cc:140")
FEATURES = f"{GUARD} Your CPU supports instructions that this TensorFlow binary was not compiled to use: AVX2 FMA"
CHANNEL = "distributed_runtime/rpc/grpc_channel.cc:215"
PS_TASKS = f"{LOGGED.format(763640, CHANNEL)} {CACHE} ps -> {{0 -> localhost:2222}}"
TASKS = "{0 -> 192.168.1.171:2222, 1 -> 192.168.1.172:2222}"
WORKER_TASKS = f"{LOGGED.format(763658, CHANNEL)} {CACHE} worker -> {TASKS}"
SERVER = LOGGED.format(764195, "distributed_runtime/rpc/grpc_server_lib.cc:324")
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
    *node(
        0, "15-48", "1524487685.116428: Worker 0: traing step 8054 dome (global step:9960)",
        49, "1524487686.584364", 366.604071, 1147.88,
    ),
    *node(
        1, "57-86", "1524487681.483467: Worker 1: traing step 1887 dome (global step:9864)",
        87, "1524487686.657494", 366.428102, 1122.46,
    ),
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
    printed("002:104", SHARED, "ps-0", ("job_name : ps", "^job_name")),
    printed("002:105", SHARED, "ps-0", ("task_index : 0", "^task_index")),
    Row(
        at="002:106",
        kind=Kind.PRINTED,
        said=FEATURES,
        run=SHARED,
        theirs=Prints("ps-0", (FEATURES,), ("cpu_feature_guard|CPU instructions",)),
        why="TensorFlow's own",
    ),
    printed("002:107", SHARED, "ps-0", (PS_TASKS, "job ps -> "), why=NO_MORE, ours=LOGGER),
    printed("002:108", SHARED, "ps-0", (WORKER_TASKS, "job worker -> "), why=NO_MORE, ours=LOGGER),
    printed("002:109", SHARED, "ps-0", (f"{SERVER} {STARTED} grpc://localhost:2222", STARTED), ours=LOGGER),
    command("002:117", "python distributed.py --job_name=ps --task_index=0", TWO_FLAGS),
    command("002:123", "python distributed.py --job_name=worker --task_index=0", TWO_FLAGS),
    command("002:129", "python distributed.py --job_name=worker --task_index=1", TWO_FLAGS),
    absent("002:134,136,143", Kind.FIGURE, "three pictures", "not in the text"),
    program("002:209", 'tf.device("/job:worker/task:n")', IN_GRAPH),
)  # fmt: skip

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

TASK_0, TASK_1 = "/job:local/replica:0/task:0", "/job:local/replica:0/task:1"
ON_TASK_1 = "TensorFlow 2.21 runs it on task 1"
LOCAL_CACHE, BOTH_CACHE = (f"{CACHE} local -> {{0 -> localhost:14401}}",
                           f"{CACHE} local -> {{0 -> localhost:20000, 1 -> localhost:20001}}")  # fmt: skip
WAITS = "CreateSession still waiting for response from worker: /job:local/replica:0/task:1"


def session(at: str, run: str, task: str, name: str) -> Row:
    line = f"Start master session {name} with config:"
    return printed(at, run, task, (line, "Start master session"), why=NO_MORE)


def greeting(at: str, run: str, task: str, device: str, text: str, why: str = "") -> Row:
    """Where a program's one op ran, and what it gave."""
    line = (f"Const: (Const): {device}/cpu:0", rf"Const: \(Const\): {device}/")
    return printed(at, run, task, line, (f"b'{text}'", "^b'Hello"), why=why)


DOCUMENT_004 = (
    program("004:38-46", "create_local_server, Session, run", LOCAL),
    printed("004:51", LOCAL, "hello_local", (LOCAL_CACHE, "job local -> "), why=NO_MORE),
    printed("004:52", LOCAL, "hello_local", (f"{STARTED} grpc://localhost:14401", STARTED)),
    session("004:53", LOCAL, "hello_local", "c7c88ec51572b4dd"),
    program("004:68-79", "First", BOTH),
    program("004:84-95", "Second", BOTH),
    printed("004:101", BOTH, "hello_first", (BOTH_CACHE, "job local -> "), why=NO_MORE),
    printed("004:102", BOTH, "hello_first", (f"{STARTED} grpc://localhost:20000", STARTED)),
    printed("004:103-104", BOTH, "hello_first", (WAITS, "till waiting for response from worker")),
    printed("004:112", BOTH, "hello_second", (BOTH_CACHE, "job local -> "), why=NO_MORE),
    printed("004:113", BOTH, "hello_second", (f"{STARTED} grpc://localhost:20001", STARTED)),
    session("004:114", BOTH, "hello_second", "efeb3f2380a99bb5"),
    greeting("004:118-119", BOTH, "hello_second", TASK_0, "Hello, distributed tensorflow 2.", ON_TASK_1),
    greeting("004:126-127", BOTH, "hello_first", TASK_0, "Hello, distributed tensorflow."),
    program("004:134-135", 'with tf.device("/job:local/task:1")', PINNED),
    greeting("004:140-141", PINNED, "hello_first", TASK_1, "Hello, distributed tensorflow."),
    absent("004:157", Kind.PROGRAM, "example/mnist", "not in the document; document 002's is"),
)

ROWS: tuple[Row, ...] = (*DOCUMENT_000, *DOCUMENT_001, *DOCUMENT_002, *DOCUMENT_003, *DOCUMENT_004)
