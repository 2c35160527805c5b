"""Show on the handbook's site what it belongs to: hooks of MkDocs.

The header has samestep's version, and the repository that this clone came from, if that is on the
web. What is typed is marked, so that it is copied without its prompt, and a page whose commands
need the examples offers them.
"""

import io
import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from samestep.base.plugins import __version__

ROOT = Path(__file__).parent.parent
EXAMPLES = "source/examples.zip"
FENCED = re.compile(r"^```(?:console|text)\n.*?^```", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"^```text\n(?=\$ )", re.MULTILINE)
REMOTE = re.compile(
    r"(?:https://|ssh://)?(?:[^@/]+@)?([\w.-]+\.[a-z]+)(?::\d+)?[:/](.+?)(\.git)?/?"
)


def on_config(config: Any) -> Any:
    """Name the version, and the repository if there is one to link to."""
    command = ["git", "remote", "get-url", "origin"]
    remote = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    config.site_name = f"samestep {__version__}"
    config.repo_url, config.repo_name = repository(remote.strip()), "repository"
    return config


def repository(remote: str) -> str:
    """Return the web address of a remote, without a name or password in it; else nothing."""
    found = REMOTE.fullmatch(remote)
    return f"https://{found[1]}/{found[2]}" if found else ""


def on_files(files: Any, config: Any) -> Any:
    """Pack the examples."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((ROOT / "examples").rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(ROOT))
    files.append(File.generated(config, EXAMPLES, content=packed.getvalue()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Mark what is typed, offer the examples that commands name, and say from where to clone."""
    here = "../" * page.file.src_uri.count("/") + EXAMPLES
    offer = f"*The folder `examples` is in the repository and in [examples.zip]({here}).*"
    first = next((block for block in FENCED.findall(markdown) if "examples/" in block), None)
    if first is not None:
        markdown = markdown.replace(first, f"{offer}\n\n{first}", 1)
    if config.repo_url:
        markdown = markdown.replace("git clone URL ", f"git clone {config.repo_url} ")
    return TYPED.sub("```console\n", markdown)
