// What HTML and htmx cannot say: two boxes at most, the number beside a slider, live updates and keys.
"use strict";
(() => {
  const body = document.body;

  function checked() { return [...document.querySelectorAll("input[name=id]:checked")]; }
  function count() {
    const boxes = checked();
    document.querySelectorAll("[data-needs-two]").forEach((button) => { button.disabled = boxes.length !== 2; });
  }
  document.addEventListener("change", (event) => {
    const box = event.target;
    if (box.matches("input[name=id]")) {
      const boxes = checked();
      if (boxes.length > 2) boxes.find((other) => other !== box).checked = false;
      count();
    }
    if (box.matches("[data-submits]")) box.form.requestSubmit();
  });
  document.addEventListener("input", (event) => {
    document.querySelectorAll(`[data-shows="${CSS.escape(event.target.id)}"]`).forEach((shown) => { shown.textContent = event.target.value; });
  });

  // "/" goes to the search field, as people expect.
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const field = document.querySelector(`[data-hotkey="${CSS.escape(event.key)}"]`);
    if (field) { event.preventDefault(); field.focus(); field.select(); }
  });

  // Something changed in the store: what is shown live is fetched again, at most once a second, and not while
  // somebody is choosing or typing in it.
  const live = document.getElementById("live");
  let due = 0;
  function changed() { if (!due) due = setTimeout(refresh, 1000); }
  function refresh() {
    due = 0;
    document.querySelectorAll("[data-live]").forEach((part) => {
      const isBusy = part.contains(document.activeElement) || part.querySelector("input:checked, details[open]");
      if (isBusy) changed(); else if (window.htmx) htmx.trigger(part, "changed");
    });
  }
  if (body.dataset.events && document.querySelector("[data-live]") && window.EventSource) {
    const source = new EventSource(body.dataset.events);
    const say = (text, isOn) => { if (live) { live.textContent = text; live.className = isOn ? "on" : "quiet"; } };
    source.onopen = () => say("live", true);
    source.onerror = () => say("not live", false);
    source.onmessage = changed;
    addEventListener("pagehide", () => source.close());
  }
  count();
})();
