"""`titans push`: a trained model to the Hub, with its code and its card, after a test load without titans_hf."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..hub.loading import CommandError, quiet, say, size
from .card import RecordsOption, TrainingOption

if TYPE_CHECKING:
    from ..hub.push import Upload


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the model and its tokenizer.")],
    repo_id: Annotated[str, typer.Option("--repo-id", metavar="USER/NAME", help="The repository on the Hub.")],
    card: Annotated[
        Path | None,
        typer.Option("--card", metavar="FILE", help="Left out, README.md in the folder; else one is made."),
    ] = None,
    records: RecordsOption = None,
    training: TrainingOption = None,
    eval_results: Annotated[
        bool, typer.Option("--eval-results", help="Records also as .eval_results/, for the Hub's leaderboards.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    branch: Annotated[str | None, typer.Option("--branch", help="Left out, the main one.")] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Of the commit.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace all files of a repository that holds something else.")
    ] = False,
    refresh_code: Annotated[
        bool, typer.Option("--refresh-code", help="Upload this titans-hf's code in place of the folder's.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list everything; send nothing.")] = False,
) -> None:
    """Put a model on the Hub: safetensors, configuration, tokenizer, code and card, in one commit.

    Nothing else in the folder is uploaded. Before anything is sent, the model is loaded in a process without titans_hf,
    by trust_remote_code, and must give the package's logits. An existing repository is updated if it is empty or holds
    the same model (same configuration, other weights), its card too; anything else in it stays, unless --overwrite.

    \b
    titans push runs/small/mag/model --repo-id user/titans-mag-small --dry-run
    titans push runs/small/mag/model --repo-id user/titans-mag-small --records mag-table1.json
    """
    from ..hub.push import add_card, check_clash, check_loading, check_repo_id, check_token, look, prepare
    from ..hub.push import push as send

    quiet()
    check_repo_id(repo_id)
    if not folder.is_dir():
        raise CommandError(f"no folder {folder}")
    api = None if dry_run else open_hub()
    with tempfile.TemporaryDirectory() as staging:
        upload = prepare(folder, Path(staging), refresh_code)
        add_card(upload, folder, *write_card(folder, repo_id, card, records or [], training, eval_results))
        found = None
        if api is not None:
            check_token(api, repo_id)
            found = look(api, repo_id, branch)
            if not overwrite:
                check_clash(found, upload, repo_id)
        check_loading(folder, upload)
        show(upload)
        if api is None:
            say(f"dry run: nothing was sent to {repo_id}")
            return
        settings = {"private": private, "branch": branch, "overwrite": overwrite, "message": message}
        say(f"pushed: {send(api, upload, repo_id, found=found, **settings)}")


def open_hub():
    """The API of the Hub with the user's token; without a token, an error before any work."""
    from huggingface_hub import HfApi, get_token

    from ..hub.push import LOG_IN

    token = get_token()
    if token is None:
        raise CommandError(f"there is no token of the Hub here: {LOG_IN}")
    return HfApi(token=token)


def write_card(
    folder: Path, repo_id: str, card: Path | None, records: list[Path], training: Path | None, eval_results: bool
) -> tuple[str, dict[str, str]]:
    """The card's text, and the files of results if they are wanted."""
    from ..hub.card_results import eval_files
    from ..hub.cards import read_model, trained_card

    given = card or (folder / "README.md" if (folder / "README.md").is_file() else None)
    if given and not eval_results:
        if records or training:
            raise CommandError(f"--records and --training make a card, and {given} is one: leave them out, or it")
        return given.read_text(encoding="utf-8"), {}
    model = read_model(folder, records, training, repo_id.split("/")[-1])
    text = given.read_text(encoding="utf-8") if given else str(trained_card(model, repo_id))
    return text, eval_files(model.records) if eval_results else {}


def show(upload: "Upload") -> None:
    """One line per file, what is left out, and the checks."""
    from ..hub.push import way

    width = max(map(len, upload.files)) + 2
    for name, count in sorted(upload.files.items()):
        typer.echo(f"{name:<{width}}{size(count):>12}  {way(name, count)}")
    files = f"{len(upload.files)} files"
    typer.echo(f"{'total':<{width}}{size(sum(upload.files.values())):>12}  {files}")
    typer.echo(f"left out: {', '.join(upload.left_out) or 'nothing'}")
    for check in upload.checks:
        typer.echo(f"checked: {check}")
