"""Check resumes: planted mistakes and right twins, frameworks, public scripts; write the page.

    python benchmarks/resume_check.py [planted|frameworks|public ...] [--public FOLDER] [--python P]

The planted scripts are those of tests/checking/test_resume.py, the frameworks' those of
resume_frameworks.py. FOLDER has public scripts as for check.py; PUBLIC says how each is resumed.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from check import _environment  # noqa: E402
from report import machine  # noqa: E402
from resume_frameworks import NAMES  # noqa: E402

from tests.checking.planted import planted  # noqa: E402
from tests.checking.test_resume import PLAIN, PLANTS, RIGHT  # noqa: E402

KEPT = Path(__file__).parent / "results" / "resume-check.json"
WORKERS = ("lightning", "trainer", "stateful_loader")
EVERY = {"at an epoch's end": 12, "within an epoch": 5}
_SPAWNED = "tcp://127.0.0.1:29611 --multiprocessing-distributed --world-size 1 --rank 0 data"
PUBLIC: dict[str, tuple[str, str, int]] = {
    "acc_checkpointing": (
        "--cpu --checkpointing_steps epoch --output_dir out",
        "--resume_from_checkpoint {checkpoint}",
        1,
    ),
    "acc_complete_nlp": (
        "--cpu --checkpointing_steps 5 --output_dir out",
        "--resume_from_checkpoint {checkpoint}",
        1,
    ),
    "cifar100_weiai": ("", "-resume", 1),
    "cifar_akamaster": (
        "--arch resnet20 --epochs 6 -b 16 -j 0 --save-dir out --save-every 1",
        "--resume out/checkpoint.th",
        1,
    ),
    "cifar_kuangliu": ("", "--resume", 1),
    "makemore": (
        "--max-steps 1500 --batch-size 8 --n-layer 1 --n-embd 16 --n-embd2 16",
        "--resume",
        1,
    ),
    "nanogpt": ("", "--init_from=resume", 1),
    "pt_ddp_torchrun": ("", "auto", 2),
    "pt_imagenet": (
        "-a resnet18 --epochs 3 -b 4 -j 0 --no-accel data",
        "--resume checkpoint.pth.tar",
        1,
    ),
    "pt_imagenet_spawn": (
        "-a squeezenet1_1 --epochs 3 -b 8 -j 0 --dist-backend gloo --dist-url " + _SPAWNED,
        "--resume checkpoint.pth.tar",
        2,
    ),
    "pt_mingpt_ddp": (
        (
            "data_config.path=data/input.txt data_config.truncate=0.005 data_config.block_size=32 "
            "trainer_config.save_every=1 trainer_config.max_epochs=3 trainer_config.batch_size=16 "
            "trainer_config.data_loader_workers=0 gpt_config.n_layer=2 gpt_config.n_head=2 "
            "gpt_config.n_embd=32"
        ),
        "auto",
        2,
    ),
    "simsiam": ("", "--resume {checkpoint}", 1),
    "vit_kentaroy": (
        "--net vit_small --nowandb --n_epochs 3 --bs 16 --noaug --noamp --patch 8",
        "--resume",
        1,
    ),
    "wrn_xternalz": (
        "--layers 10 --widen-factor 1 --epochs 4 -b 16 --no-augment",
        "--resume runs/WideResNet-28-10/checkpoint.pth.tar",
        1,
    ),
}
"""Of each public script its arguments, if other than the case's, how it is resumed, its ranks."""


def main() -> None:
    """Check what is asked for, two at a time, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of scripts, or kinds")
    parser.add_argument("--public", type=Path, help="the folder of public scripts")
    parser.add_argument("--python", default=sys.executable, help="which has what the scripts need")
    given = parser.parse_args()
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:

        def one(kind: str, name: str, place: Path, words: list[str]) -> None:
            found.setdefault(kind, {})[name] = said = checked(place, words, given.python)
            print(
                kind, name, said["codes"] or said["failed"] or "right", f"{said['seconds']:.0f} s"
            )
            found["machine"] = machine()
            KEPT.write_text(json.dumps(found, indent=1) + "\n")
            KEPT.with_suffix(".md").write_text(page(found))

        for kind, name, place, words in cases(Path(folder), given.public):
            if not given.names or {kind, name} & {*given.names}:
                pool.submit(one, kind, name, place, words)


def cases(folder: Path, public: Path | None) -> list[tuple[str, str, Path, list[str]]]:
    """Return kind, name, folder and words of each check."""
    made = []
    for kind, table in (("planted", PLANTS), ("right", RIGHT)):
        for name, (base, changes, how) in table.items():
            place = folder / kind / name
            place.mkdir(parents=True)
            (place / "train.py").write_text(planted(*changes, base=base))
            resume = how.get("resume", "--resume out/last.pt" if base is PLAIN else "auto")
            others = [f"--resume-nproc={n}" for n in how.get("resume_nproc", [])]
            words = ["--resume", resume, "--nproc", str(how.get("nproc", 1)), *others, "train.py"]
            made.append((kind, name, place, words))
    script = str(Path(__file__).parent / "resume_frameworks.py")
    for name in NAMES:
        for when, every in EVERY.items():
            words = ["--resume", "--resume", "--nproc", "1", "--resume-nproc", "2", script]
            place = folder / f"{name}-{every}"
            place.mkdir()
            for workers in (0, 2) if name in WORKERS else (0,):
                more = ["--", name, "--every", str(every), "--workers", str(workers)]
                made.append(
                    ("frameworks", f"{name}, {when}, {workers} workers", place, words + more)
                )
    for name, (arguments, resume, nproc) in PUBLIC.items() if public else ():
        place = public / name
        case = json.loads((place / "case.json").read_text())
        more = shlex.split(arguments or case["arguments"])
        words = ["--resume", resume, "--nproc", str(nproc), "--seconds", "60", case["script"]]
        made.append(("public", name, place, [*words, "--", *more]))
    return made


def checked(place: Path, words: list[str], python: str) -> dict[str, Any]:
    """Return the codes that `check --resume` reports, and how long it took."""
    began = time.perf_counter()
    done = subprocess.run(
        [python, "-m", "samestep", "check", "--json", *words],
        cwd=place,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if not done.stdout.startswith("{"):
        lines = [line for line in done.stderr.splitlines() if line.startswith("samestep: ")]
        return {"codes": {}, "notes": [], "failed": lines[-1] if lines else "?", "seconds": seconds}
    said = json.loads(done.stdout)
    codes = {one["code"]: f"line {one['line']}: {one['evidence']}" for one in said["findings"]}
    return {"codes": codes, "notes": said["notes"], "failed": "", "seconds": seconds}


def page(found: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    facts = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    kinds = {kind: found.get(kind, {}) for kind in ("planted", "right", "frameworks", "public")}
    hits = sum(name[:5] in one["codes"] for name, one in kinds["planted"].items())
    false = sum(bool(one["codes"]) for one in kinds["right"].values())
    hits_of, false_of = len(kinds["planted"]), len(kinds["right"])
    found_text = (
        f"Of {hits_of} planted mistakes {hits} were found; of {false_of} right twins {false} "
    )
    lines = [
        "# Resumes that were checked",
        "",
        f"{facts}. Written by benchmarks/resume_check.py.",
        "",
    ]
    lines += [f"{found_text}had a finding."]
    titles = {
        "planted": "Planted mistakes",
        "right": "Right twins",
        "frameworks": "Frameworks, resumed as their pages say (benchmarks/resume_frameworks.py)",
        "public": "Public scripts",
    }
    for kind, title in titles.items():
        lines += ["", f"## {title}", "", "| | seconds | found |", "|---|---|---|"]
        for name, one in kinds[kind].items():
            said = [f"{code}: {text}" for code, text in one["codes"].items()]
            said += [note for note in one["notes"] if not note.startswith("killed after")]
            told = "; ".join(said) or one["failed"] or "the same training"
            lines.append(f"| {name} | {one['seconds']:.0f} | {told.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
