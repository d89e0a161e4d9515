"""The notebook docs/tour.ipynb runs, in an empty folder."""

import pathlib

import nbclient
import nbformat
import pytest

TOUR = pathlib.Path(__file__).parent.parent / "docs" / "tour.ipynb"


@pytest.mark.slow
def test_the_tour_runs_as_it_is_shown(tmp_path):
    """With two programs in the first figure, not seven."""
    shown, tour = nbformat.read(TOUR, 4), TOUR.read_text()
    few = tour.replace(
        'workdir=\\"runs/tour\\"', '{\\"arms\\": (\\"learned\\", \\"frozen\\")}, workdir=\\"runs/tour\\"'
    )
    assert few != tour
    ran = nbclient.NotebookClient(
        nbformat.reads(few, 4), timeout=900, resources={"metadata": {"path": str(tmp_path)}}, coalesce_streams=True
    ).execute()
    for before, after in zip(shown.cells, ran.cells, strict=True):
        kinds = [[output.output_type for output in cell.get("outputs", ())] for cell in (before, after)]
        assert kinds[0] == kinds[1], before.source
    assert (tmp_path / "runs" / "tour-trace" / "report.html").exists()
