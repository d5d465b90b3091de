// What HTML and htmx cannot say: choosing some of many, the number beside a slider, copying, ages, keys, dragging over
// a timeline, and following the store.
"use strict";
(() => {
  const body = document.body;
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

  // --- choosing checkpoints of a history ---

  const chosen = () => all("input[name=id]:checked");
  function tellChosen() {
    const boxes = chosen();
    all("[data-needs]").forEach((button) => {
      const { needs } = button.dataset;
      button.disabled = needs === "some" ? !boxes.length : boxes.length !== Number(needs);
    });
    const told = document.getElementById("chosen");
    if (!told) return;
    const names = boxes.map((box) => box.closest(".commit").querySelector(".seq").textContent);
    const text = names.length > 2 ? `${names.length} chosen` : names.length ? `${names.join(" and ")} chosen` : told.dataset.nothing;
    if (told.textContent !== text) told.textContent = text;
  }
  document.addEventListener("change", (event) => {
    const box = event.target;
    if (box.matches("input[name=id]")) tellChosen();
    if (box.matches("[data-submits]")) box.form.requestSubmit();
  });
  document.addEventListener("input", (event) => {
    all(`[data-shows="${CSS.escape(event.target.id)}"]`).forEach((shown) => { shown.textContent = event.target.value; });
  });

  // --- copying what is to be typed elsewhere ---

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copies]");
    if (!button) return;
    let told = "Copied";
    try {
      await navigator.clipboard.writeText(button.dataset.copies);
    } catch {  // no clipboard without https: the text is selected instead
      getSelection().selectAllChildren(button.previousElementSibling);
      told = "Selected";
    }
    button.textContent = told;
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });

  // --- keys: "/" goes to the search field, as people expect; "?" shows them all ---

  const keys = document.getElementById("keys");
  const step = (by) => {
    const links = all("td.name a, a.step, .hit a").filter((link) => link.offsetParent);
    const at = links.indexOf(document.activeElement);
    const next = links[at < 0 && by < 0 ? links.length - 1 : at + by];
    if (next) next.focus();
  };
  const tick = () => {
    const box = document.activeElement.closest && document.activeElement.closest(".commit")?.querySelector("input[name=id]");
    if (box) box.click();
  };
  const does = { "?": () => keys && keys.togglePopover(), j: () => step(1), k: () => step(-1), x: tick };
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input:not([type=checkbox]), select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const field = document.querySelector(`[data-hotkey="${CSS.escape(event.key)}"]`);
    if (!field && !does[event.key]) return;
    event.preventDefault();
    if (!field) does[event.key]();
    else if (field.matches("a")) field.click();
    else { field.focus(); field.select(); }
  });

  // --- what is searched for is in the address, so that it can be shared and comes back ---

  document.addEventListener("input", (event) => {
    const form = event.target.closest("form[role=search]");
    if (!form) return;
    const address = new URL(location);
    new FormData(form).forEach((value, name) => {
      if (value) address.searchParams.set(name, value); else address.searchParams.delete(name);
    });
    address.searchParams.delete("after");
    history.replaceState(null, "", address);
  });

  // --- a timeline is zoomed by dragging over its axis ---

  let drag = null;
  const dragged = (event) => {
    const box = drag.axis.getBoundingClientRect();
    const part = (x) => Math.min(1, Math.max(0, (x - box.left) / box.width));
    const ends = [part(drag.x), part(event.clientX)].sort((a, b) => a - b);
    return { ends, isWide: (ends[1] - ends[0]) * box.width >= 6 };
  };
  document.addEventListener("pointerdown", (event) => {
    const axis = event.target.closest("[data-zooms] svg");
    if (!axis || event.button) return;
    event.preventDefault();
    drag = { axis, x: event.clientX };
    axis.setPointerCapture(event.pointerId);
  });
  document.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const { ends } = dragged(event);
    const mark = drag.axis.querySelector(".chosen");
    mark.setAttribute("x", `${ends[0] * 100}%`);
    mark.setAttribute("width", `${(ends[1] - ends[0]) * 100}%`);
  });
  document.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const { ends, isWide } = dragged(event);
    const [from, to] = drag.axis.closest("[data-zooms]").dataset.zooms.split(" ").map(Number);
    drag = null;
    if (!isWide) return;
    const address = new URL(location);
    ["session", "start"].forEach((name) => address.searchParams.delete(name));
    ["from", "to"].forEach((name, n) => address.searchParams.set(name, (from + ends[n] * (to - from)).toFixed(6)));
    location.assign(address);
  });

  // --- a pointer over a chart reads the values under it, and a click leads to the checkpoint ---

  const nearest = (svg, x) => [...svg.querySelectorAll("polyline[data-labels]")].map((line) => {
    const points = [...line.points];
    const at = points.reduce((best, point, n) => (Math.abs(point.x - x) < Math.abs(points[best].x - x) ? n : best), 0);
    const [seq, value] = line.dataset.labels.split(" ")[at].split(":");
    return { line, point: points[at], seq, value };
  });
  const spot = (event, svg) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale, box, scale };
  };
  const unread = (plot) => all(".readout, .hair", plot).forEach((part) => part.remove());
  const part = (plot, name) => plot.querySelector(`.${name}`) || plot.appendChild(Object.assign(document.createElement("div"), { className: name }));
  document.addEventListener("pointermove", (event) => {
    const plot = event.target.closest && event.target.closest("[data-readout]");
    all("[data-readout]").forEach((other) => { if (other !== plot) unread(other); });
    const svg = plot && plot.querySelector("svg");
    if (!svg) return;
    const { x, box, scale } = spot(event, svg);
    const found = nearest(svg, x);
    if (!found.length) return;
    const closest = found.reduce((best, each) => (Math.abs(each.point.x - x) < Math.abs(best.point.x - x) ? each : best));
    part(plot, "hair").style.left = `${closest.point.x / scale}px`;
    const readout = part(plot, "readout");
    readout.replaceChildren(...found.map(({ line, seq, value }) => {
      const row = document.createElement("div"), text = document.createElement("span");
      row.style.color = getComputedStyle(line).stroke;
      text.textContent = `${found.length > 1 ? `${line.dataset.name} ` : ""}#${seq}  ${value}`;
      row.append(text);
      return row;
    }));
    const isRight = closest.point.x / scale > box.width / 2;
    readout.style.left = isRight ? "auto" : `${closest.point.x / scale + 10}px`;
    readout.style.right = isRight ? `${box.width - closest.point.x / scale + 10}px` : "auto";
  });
  document.addEventListener("click", (event) => {
    const svg = event.target.closest("[data-readout] svg");
    if (!svg || event.target.closest("a")) return;
    const { x, y } = spot(event, svg);
    const far = ({ point }) => Math.hypot(point.x - x, point.y - y);
    const [first] = nearest(svg, x).sort((a, b) => far(a) - far(b));
    if (first) location.assign(first.line.dataset.at + first.seq);
  });

  // --- a cell of a map leads to its item ---

  document.addEventListener("click", (event) => {
    const drawing = event.target.closest("[data-items] svg");
    if (!drawing) return;
    const { items, per } = drawing.parentElement.dataset;
    const box = drawing.getBoundingClientRect();
    const pitch = 16 * box.width / drawing.viewBox.baseVal.width;
    const cell = Math.floor((event.clientY - box.top) / pitch) * 60 + Math.floor((event.clientX - box.left) / pitch);
    location.assign(`${items}&number=${cell * per}&count=${per}`);
  });

  // --- ages go on while nobody reloads ---

  function ago(seconds) {
    if (seconds < 1) return "now";
    if (seconds < 60) return `${Math.floor(seconds)} s ago`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
    if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h ago`;
    return `${Math.floor(seconds / 86400)} days ago`;
  }
  setInterval(() => {
    if (document.hidden) return;
    all("time[datetime]").forEach((time) => {
      const seconds = (Date.now() - Date.parse(time.dateTime)) / 1000;
      if (seconds >= 0 && seconds < 60 * 86400) time.textContent = ago(seconds);
    });
  }, 10000);

  // --- what goes wrong on the way ---

  const problem = document.getElementById("problem");
  function tell(text) { problem.textContent = text; problem.hidden = !text; }
  document.addEventListener("htmx:error", (event) => {
    tell("The service does not answer. What is shown may be old.");
    const element = event.target;
    const target = element.getAttribute && element.getAttribute("data-hx-target");
    const place = target && !target.startsWith("find ") ? document.querySelector(target) : element.querySelector && element.querySelector(":scope > .tree, :scope > div");
    if (place && (element.matches("details") || element.matches("input[type=range], form"))) place.textContent = "It could not be loaded. Reload the page to try again.";
  });
  document.addEventListener("htmx:response:error", () => tell("The service refused to refresh this page. Reload it to see why."));
  document.addEventListener("htmx:after:swap", () => { tell(""); tellChosen(); });

  // --- what somebody typed or unfolded before htmx was there, on a slow network, is done as soon as it is ---

  const wasUsed = (field) => field.matches("input:not([type=hidden], [type=checkbox])") && field.value !== field.defaultValue;
  function catchUp(part) {
    if (!window.htmx || !part.matches || !part.matches("[data-hx-get]")) return;
    if (part.matches("details[open]")) return htmx.trigger(part, "toggle");
    const fields = part.matches("form") ? all("input", part) : [part];
    if ((part.dataset.hxTrigger || "").startsWith("input") && fields.some(wasUsed)) htmx.trigger(part, "input");
  }
  document.addEventListener("htmx:after:init", (event) => catchUp(event.target));
  all("[data-hx-get]").forEach(catchUp);  // of those that had htmx before this script; to the others it says nothing

  // --- following the store: what a change concerns is fetched again, at most once a second ---

  const isHeardBy = (part, change) =>
    (!part.dataset.liveJob || part.dataset.liveJob === change.job) &&
    (!part.dataset.liveOn || part.dataset.liveOn.split(" ").includes(change.action));
  let changes = [];
  let due = 0;
  let refreshedAt = 0;
  function refresh() {
    due = 0;
    refreshedAt = Date.now();
    if (document.hidden || !window.htmx) return;  // seen to when somebody looks again
    const heard = changes;
    changes = [];
    all("[data-live]").forEach((part) => {
      const isRow = (change) => part.querySelector(`[id="c-${CSS.escape(change.checkpoint || "")}"]`);
      const isOld = part.id.startsWith("rows-") && part.id !== "rows-newest";  // changes only where its own rows do
      if (heard.some((change) => isHeardBy(part, change) && (!isOld || isRow(change)))) htmx.trigger(part, "changed");
    });
  }
  function changed(message) {
    const change = JSON.parse(message.data);
    if (change.action === "reset") return location.reload();  // another store is there now
    if (changes.length < 2000) changes.push(change);
    if (!due) due = setTimeout(refresh, Math.max(100, refreshedAt + 1000 - Date.now()));
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden && changes.length) refresh(); });

  // An answer that was asked for before the part showed something else, say what somebody searched for, is out of date.
  document.addEventListener("htmx:before:swap", (event) => {
    const { sourceElement: part, request } = event.detail.ctx;
    if (!part.matches("[data-live]")) return;
    const { pathname, search } = new URL(part.getAttribute("data-hx-get"), location);
    if (request.action === pathname + search) return;
    event.preventDefault();
    htmx.trigger(part, "changed");
  });

  // A new branch may pass through parts of the history that are below it: they are drawn again with its lane.
  document.addEventListener("htmx:after:swap", () => {
    all(".history[data-lanes]").forEach((part) => {
      const below = part.nextElementSibling;
      const address = below && below.getAttribute("data-hx-get");
      if (!address) return;
      const wanted = new URL(address, location);
      if ((wanted.searchParams.get("lanes") || "") === part.dataset.lanes) return;
      wanted.searchParams.set("lanes", part.dataset.lanes);
      below.setAttribute("data-hx-get", wanted.pathname + wanted.search);
      if (below.matches(".history")) htmx.trigger(below, "changed");
    });
  });
  document.addEventListener("htmx:after:request", (event) => {
    const newer = document.getElementById("newer");
    const answer = event.detail.ctx && event.detail.ctx.response;
    if (newer && answer && answer.status === 204) newer.hidden = false;
  });

  if (body.dataset.events && document.querySelector("[data-live]") && window.EventSource) {
    const live = document.getElementById("live");
    const say = (text, isOn) => { live.textContent = text; live.className = isOn ? "on" : "quiet"; };
    const opened = () => say("live", true);
    const failed = () => say("not live, trying again", false);
    const { events, after, worker } = body.dataset;
    if (window.SharedWorker) {  // all tabs share one connection
      const { port } = new SharedWorker(worker, "kedge-events");
      port.onmessage = ({ data }) => {
        if (data.state) return data.state === "open" ? opened() : failed();
        opened();
        changed(data);
      };
      port.postMessage({ address: events, after: Number(after) });
      addEventListener("pagehide", () => port.postMessage({ close: true }));
    } else {
      const source = new EventSource(`${events}&after=${after}`);
      source.onopen = opened;
      source.onerror = failed;
      source.onmessage = changed;
      addEventListener("pagehide", () => source.close());
    }
    addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
  }
  tellChosen();
  const menu = document.querySelector(".menu"), current = document.querySelector(".menu [aria-current]");
  if (menu && current) menu.scrollLeft = current.offsetLeft - 64;  // of a phone: the page one is on stays in sight
})();
