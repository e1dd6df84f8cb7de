import json
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
    # Two terms, one expected length, two drafts, one check, rate, norm, speed.
    assert len(page.lines) == 9
    assert [len(points.split()) for points in page.lines][:6] == [3, 3, 3, 3, 3, 2]
    first = [tuple(map(float, point.split(","))) for point in page.lines[0].split()]
    assert first[0][0] < first[1][0] < first[2][0]
    assert first[0][1] < first[1][1] < first[2][1]  # the loss falls; the page's y grows downwards
    assert page.heads[-1] == "Last evaluation"


def test_a_log_of_one_step_is_drawn(tmp_path):
    log = tmp_path / "train_log.jsonl"
    log.write_text(json.dumps(STEP | {"step": 1}) + "\n")
    write_curves(log, tmp_path / "curves.html", "short")
    assert (tmp_path / "curves.html").read_text().count("<polyline") == 8
