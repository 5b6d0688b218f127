// Shows changes on disk without a reload, and sends forms without a button.
'use strict';
(() => {
  const POLL_MS = 2000, WAIT_MS = 20000, SEEN = 'X-Treetune-Seen';

  // ---- live: the page requests itself again; the server answers 204 as long as nothing has changed
  let asking = null;
  async function refresh() {
    if (asking || document.hidden) return;
    const address = location.href;
    asking = new AbortController();
    const deadline = setTimeout(() => asking.abort(), WAIT_MS);
    try {
      const answer = await fetch(address, { headers: { [SEEN]: document.body.dataset.fingerprint || '' }, signal: asking.signal });
      const type = answer.headers.get('Content-Type') || '';
      connection(answer.status !== 403);
      if (answer.status === 204 || !type.startsWith('text/html') || location.href !== address) return;
      show(await answer.text());
    } catch { connection(false); } finally { clearTimeout(deadline); asking = null; }
  }
  function connection(there) { document.getElementById('connection').hidden = there; }
  function show(text) {
    const next = new DOMParser().parseFromString(text, 'text/html');
    document.body.dataset.fingerprint = next.body.dataset.fingerprint || '';
    document.title = next.title;
    for (const old of document.querySelectorAll('[data-live]')) {
      const made = next.getElementById(old.id);
      if (made) Idiomorph.morph(old, made, { callbacks: {
        // Keeps text that was typed, boxes that were ticked, details that were opened, and drawn charts.
        beforeNodeMorphed: (node) => !(node instanceof Element && (node.hasAttribute('data-kept') || node === document.activeElement)),
        beforeAttributeUpdated: (name, node) => !((name === 'open' && (node.matches('details') || node.matches('dialog'))) ||
          (name === 'checked' || name === 'value') && node.matches('input') && (node.checked !== node.defaultChecked || node.value !== node.defaultValue) || name === 'class' && node.matches('tr.at, tbody')),
      } });
    }
    changed();
  }
  function changed() { document.dispatchEvent(new Event('treetune:changed')); }
  setInterval(refresh, POLL_MS);
  document.addEventListener('visibilitychange', refresh);

  // ---- slow parts are loaded after the page; those in a `details` when it is opened
  async function fill(element) {
    const address = element.dataset.later;
    delete element.dataset.later;
    try {
      const answer = await fetch(address, { signal: AbortSignal.timeout(WAIT_MS) });
      const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
      element.replaceChildren(...(page.getElementById('part') || page.querySelector('main')).childNodes);
    } catch (error) { element.textContent = `Loading failed: ${error.message}`; }
    changed();
  }
  function later() {
    for (const element of document.querySelectorAll('[data-later]')) if (element.closest('details')?.open !== false) fill(element);
  }
  document.addEventListener('toggle', later, true);
  document.addEventListener('treetune:changed', later);
  later();

  // ---- forms that update the page and its address as soon as a field changes
  let soon = null;
  async function submit(form) {
    const query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ''));
    const address = form.getAttribute('action') + (query.size ? '?' + query : '');
    history.replaceState(null, '', address);
    document.body.dataset.fingerprint = '';
    if (asking) asking.abort();
    asking = null;
    await refresh();
  }
  document.addEventListener('input', (event) => {
    const form = event.target.form;
    if (!form || !('instant' in form.dataset) || 'own' in event.target.dataset) return;
    clearTimeout(soon);
    soon = setTimeout(() => submit(form), event.target.matches('[type=search],[type=text],[type=number]') ? 250 : 0);
  });
  document.addEventListener('submit', (event) => {
    if ('instant' in event.target.dataset) { event.preventDefault(); submit(event.target); }
  });
})();
