// Shared by all pages: keyboard shortcuts, rows of tables, theme.
'use strict';
(() => {
  const PAIR_MS = 4000;

  // ---- keys: an element with data-key="g e" is clicked (or gets the focus) when g, then e is pressed
  const ROW_KEYS = { 'j': 'next row', 'k': 'previous row', 'Enter': 'open the row', 'x': 'select the row' };
  let first = '', firstAt = 0;
  const visible = (element) => element.getClientRects().length > 0;
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (event.target.matches('input:not([type=checkbox]):not([type=range]),select,textarea')) {
      if (event.key === 'Escape') event.target.blur();
      return;
    }
    if (document.getElementById('keys').open && event.key !== '?') return;
    const key = first && Date.now() - firstAt < PAIR_MS ? `${first} ${event.key}` : event.key;
    first = '';
    const element = [...document.querySelectorAll(`[data-key="${CSS.escape(key)}"]`)].find(visible);
    if (element) { event.preventDefault(); act(element); }
    else if (['j', 'k', 'Enter', 'x'].includes(event.key)) rows(event);
    else if (document.querySelector(`[data-key^="${CSS.escape(event.key)} "]`)) { first = event.key; firstAt = Date.now(); }
  });
  function act(element) {
    if (element.matches('input:not([type=checkbox]),select,textarea')) { element.focus(); element.select?.(); }
    else element.click();
  }
  function rows(event) {
    const all = [...document.querySelectorAll('[data-rows] tbody tr')].filter(visible);
    if (!all.length) return;
    const at = all.findIndex((row) => row.matches('.at') || !document.querySelector('[data-rows] .at') && row.matches(':target'));
    const row = all[at];
    if (event.key === 'Enter') { if (row?.dataset.href && event.target.tagName !== 'A' && event.target.tagName !== 'BUTTON') location.href = row.dataset.href; return; }
    if (event.key === 'x') { row?.querySelector('input[type=checkbox]')?.click(); return; }
    const next = all[Math.min(all.length - 1, Math.max(0, at + (event.key === 'j' ? 1 : -1)))];
    row?.classList.remove('at');
    next.classList.add('at');
    next.scrollIntoView({ block: 'nearest' });
  }
  document.getElementById('help').addEventListener('click', () => {
    const dialog = document.getElementById('keys');
    if (dialog.open) { dialog.close(); return; }
    const list = document.getElementById('keys-list');
    const meanings = new Map(Object.entries(document.querySelector('[data-rows]') ? ROW_KEYS : {}));
    for (const element of document.querySelectorAll('[data-key]')) {
      if (visible(element)) meanings.set(element.dataset.key, element.title || element.textContent.trim());
    }
    list.replaceChildren(...[...meanings].flatMap(([key, text]) => {
      const term = document.createElement('dt'), meaning = document.createElement('dd');
      term.textContent = key; meaning.textContent = text;
      return [term, meaning];
    }));
    dialog.showModal();
  });

  // ---- a row is opened by a click anywhere on it
  document.addEventListener('click', (event) => {
    const row = event.target.closest('tr[data-href]');
    if (row && !event.target.closest('a,button,input,label,summary') && !String(getSelection())) location.href = row.dataset.href;
  });

  // ---- groups of rows: ticked at once, folded
  document.addEventListener('click', (event) => {
    const group = event.target.closest('tbody');
    if (event.target.matches('[data-fold]')) group.classList.toggle('folded');
    if (event.target.matches('[data-ticks]')) for (const box of group.querySelectorAll('[name=run]')) box.checked = event.target.checked;
  });

  // ---- links to the next and previous answer replace the browser's history entry, so that Back returns to the list
  document.addEventListener('click', (event) => {
    const step = event.target.closest('a[data-step]');
    if (!step || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    location.replace(step.href);
  });
  const list = document.querySelector('.briefs'), here = list?.querySelector('[aria-current]');
  if (here) list.scrollTop = here.offsetTop - list.offsetTop - list.clientHeight / 3;

  // ---- theme
  document.getElementById('theme').addEventListener('click', () => {
    const root = document.documentElement;
    const dark = matchMedia('(prefers-color-scheme: dark)').matches;
    const next = { '': dark ? 'light' : 'dark', [dark ? 'light' : 'dark']: dark ? 'dark' : 'light' }[root.dataset.theme || ''] || '';
    if (next) { root.dataset.theme = next; localStorage.setItem('theme', next); }
    else { delete root.dataset.theme; localStorage.removeItem('theme'); }
    changed();
  });
  function changed() { document.dispatchEvent(new Event('treetune:changed')); }
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', changed);
})();
