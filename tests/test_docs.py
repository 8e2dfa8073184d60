"""Every sample in the documentation runs, every link leads somewhere, and the README's diff is the example."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from commands import run
from samples import Sample, missing_lines, samples_in
from sources import ROOT

from scripts import run_script

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("khorovod-ipu/*.md")])
SAMPLES = [sample for page in PAGES for sample in samples_in(page, str(page.relative_to(ROOT)))]
# Samples of one framework follow each other, so that what has loaded it is used again.
_KERAS = "torch"
RUN = [sample for sample in SAMPLES if "not run" not in sample.options]


def framework_of(sample: Sample) -> str:
    """Which framework its ranks may have loaded beforehand: none where the launcher is a part of what it shows."""
    imports = r"^ *(?:import|from) (?:horovod\.|(?=tensorflow\.python\.ipu))(torch|tensorflow|keras|jax|popart)"
    used = re.findall(imports, sample.text, re.MULTILINE)
    by_rank = all(re.match(r"\[\d\]<std(out|err)>:", line) for line in sample.output)
    if not used or not by_rank or "exit" in sample.options:
        return ""
    return f"keras-{_KERAS}" if used[0] == "keras" else used[0]


@pytest.mark.slow
@pytest.mark.parametrize("sample", RUN, ids=lambda sample: sample.label)
def test_sample_runs_and_prints_what_the_page_says(sample: Sample, tmp_path: Path) -> None:
    if sample.language == "python":
        script = tmp_path / "sample.py"
        script.write_text(sample.text, encoding="utf-8")
        np = sample.options.get("np", "2")
        if framework := framework_of(sample):
            code, output = run_script(script, int(np), tmp_path, framework)
        else:
            code, output = run(["horovodrun", "-np", np, "python", str(script)], tmp_path, OMP_NUM_THREADS="1")
    else:
        for folder in ("examples", "khorovod-ipu"):  # what the commands name, without the checkout to write into
            (tmp_path / folder).symlink_to(ROOT / folder)
        code, output = run("set -e\n" + sample.text, tmp_path, OMP_NUM_THREADS="1")
    assert code == int(sample.options.get("exit", "0")), f"exit code {code}:\n{output}"
    missing = missing_lines(sample.output, output)
    assert not missing, "not printed: " + "\n".join(missing) + f"\nbut:\n{output}"


@pytest.mark.parametrize("sample", [s for s in SAMPLES if "not run" in s.options], ids=lambda sample: sample.label)
def test_sample_that_is_not_run_says_why(sample: Sample) -> None:
    assert sample.options["not run"], "<!-- not run: the reason -->"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_of_samples_are_known(page: Path) -> None:
    unknown = {o for s in samples_in(page, page.name) for o in s.options} - {"np", "exit", "not run"}
    assert not unknown


def test_shell_scripts_parse() -> None:
    """Tests of their systems run most of them."""
    wrong = {}
    for page in PAGES:
        for script in re.findall(r"^```(?:bash|sh)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
            done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60)
            if done.returncode or done.stderr:
                wrong[str(page.relative_to(ROOT))] = done.stderr
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(
        r"\]\((?!https?:)([^)#]+)", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    )
    dead = [link for link in links if not (page.parent / link).exists()]
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|examples|scripts)/[\w/.-]+)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not any((top / name).exists() for top in (ROOT, page.parent))]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "start").glob("*.md")), ids=lambda page: page.name)
def test_a_page_to_start_with_installs_what_its_script_imports(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    installs = re.search(r"pip install '\.\[(.*?)\]'", text)
    assert installs
    assert ("import sklearn" not in text and "from sklearn" not in text) or "examples" in installs[1].split(",")


def test_the_site_leads_to_every_page() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", config.partition("\nnav:\n")[2]))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert not {page for page in pages if not page.startswith("decisions/0")} - named


@pytest.mark.slow
def test_the_tables_of_the_migrating_page_are_those_of_the_code(tmp_path: Path) -> None:
    code, output = run_script(ROOT / "scripts" / "migrating.py", 1, tmp_path, f"keras-{_KERAS}", ["--check"])
    assert code == 0, f"run `python scripts/migrating.py`: {output[-500:]}"


def test_the_architecture_and_the_readme_are_short() -> None:
    architecture = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(architecture.split()) <= 600
    assert architecture.partition("## Glossary")[2].count("\n- ") <= 20
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    records = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    rows = [f"[{path.name[:4]}]({path.name}) | " for path in records]
    assert records
    assert not [row for row in rows if row not in index]
    assert len(rows) == len({path.name[:4] for path in records}), "two records with one number"


def test_the_diff_in_the_readme_is_the_minimal_example() -> None:
    match = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert match
    lines = match[1].splitlines()
    code = (ROOT / "examples" / "torch_minimal.py").read_text(encoding="utf-8").split('"""\n', 1)[1].lstrip("\n")
    code = re.sub(r"  # \d$", "", code, flags=re.MULTILINE)
    shown = [line[1:] for line in lines if line[:1] in ("+", " ")]
    assert [line for line in shown if line] == [line for line in code.splitlines() if line]
    assert sum(line.startswith("+") for line in lines) == 5
    assert not any(line.startswith("-") for line in lines)


def test_a_missing_line_is_noticed() -> None:
    assert missing_lines(["[0]<stdout>: a ... c", "x [1] y"], "[0]<stdout>: a b  c\nx [1] y\n") == []
    assert missing_lines(["a ... d"], "a b c") == ["a ... d"]
