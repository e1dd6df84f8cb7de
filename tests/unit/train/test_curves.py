import json
import re
from html.parser import HTMLParser

from lean_laguna.train.curves import write_curves

STEP = {
    "event": "step", "loss": 2.0, "ce": 3.0, "lr": 1e-3, "grad_norm": 1.0, "tok_per_s": 10,
    "acceptance": [0.5, 0.25], "tau_prob": 1.5,
}  # fmt: skip


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.lines, self.heads, self.fetched = [], [], []
        self._in_head = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self._in_head = tag == "h2"
        if tag == "polyline":
            self.lines.append(given["points"])
        self.fetched += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        if self._in_head:
            self.heads.append(data)
            self._in_head = False


def test_a_page_shows_the_logs_curves_and_fetches_nothing(tmp_path):
    events = [
        {"event": "start", "parameters": 1234},
        *[STEP | {"step": s, "loss": 2.0 / s} for s in (1, 25, 50)],
        {"event": "val", "step": 25, "greedy_tau_chain": 2.0},
        {"event": "final", "step": 50, "greedy_tau_chain": 3.0, "time": 1.0},
    ]
    log = tmp_path / "train_log.jsonl"
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    write_curves(log, tmp_path / "curves.html", "a <run>")
    text = (tmp_path / "curves.html").read_text()
    page = Page(text)
    assert page.fetched == []
    assert "a &lt;run&gt;" in text
    assert "1,234 parameters, 50 steps" in text
    # One check, two terms, one expected length, two drafts, rate, norm, speed.
    assert len(page.lines) == 9
    assert [len(points.split()) for points in page.lines][:6] == [2, 3, 3, 3, 3, 3]
    first = [tuple(map(float, point.split(","))) for point in page.lines[1].split()]
    assert first[0][0] < first[1][0] < first[2][0]
    assert first[0][1] < first[1][1] < first[2][1]  # the loss falls; the page's y grows downwards
    assert page.heads[-1] == "Last evaluation"


def test_a_log_of_one_step_is_drawn(tmp_path):
    log = tmp_path / "train_log.jsonl"
    log.write_text(json.dumps(STEP | {"step": 1}) + "\n")
    write_curves(log, tmp_path / "curves.html", "short")
    page = (tmp_path / "curves.html").read_text()
    assert page.count("<polyline") == page.count("<circle") == 8  # a lone point has no line to be seen by
    assert "not finished" in page


def test_acceptance_by_draft_is_a_table_and_all_ink_is_inside_the_drawing(tmp_path):
    accuracy = {f"greedy_cond_acc_{k}": 0.9 - k / 100 for k in (1, 2)}
    steps = [STEP | {"step": s, "lr": s * 1e-4, "tok_per_s": s * 100_000} for s in (1, 300)]
    final = {"event": "final", "step": 307, "elapsed_s": 76.6, "greedy_tau_chain": 3.5} | accuracy
    log = tmp_path / "train_log.jsonl"
    log.write_text("".join(json.dumps(event) + "\n" for event in (*steps, final)))
    write_curves(log, tmp_path / "curves.html", "run")
    page = (tmp_path / "curves.html").read_text()
    assert "307 steps, 77 s" in page
    assert "<td>greedy, given all before it</td><td>0.890</td><td>0.880</td>" in page
    assert "<td>greedy text, accepted length</td><td>3.5</td>" in page
    labels = re.findall(r'<text x="([0-9.]+)" y="[0-9.]+" text-anchor="(\w+)">([^<]+)</text>', page)
    for x, anchor, label in labels:
        width = 6.2 * len(label)
        left = float(x) - (width if anchor == "end" else width / 2)
        assert left >= 0, label
        assert left + width <= 640, label
