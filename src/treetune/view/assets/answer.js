// The page of an answer: colours tokens, describes the token under the pointer, and sets formulas.
'use strict';
(() => {
  const FULL = 10;
  let at = null, columns = null, box = null;

  function colour() {
    const tokens = document.querySelector('.tokens');
    const choice = document.getElementById('colour');
    if (!tokens || !choice) return;
    if (tokens !== box) { box = tokens; columns = JSON.parse(tokens.dataset.columns); at = null; }
    const option = choice.selectedOptions[0];
    const column = columns[choice.value], scale = Number(option.dataset.scale);
    const signed = 'signed' in option.dataset;
    document.getElementById('meaning').textContent = option.dataset.meaning;
    for (const token of tokens.querySelectorAll('[data-i]')) {
      const value = column?.[token.dataset.i];
      token.classList.remove(...[...token.classList].filter((name) => /^(s\d+|up|down|plain)$/.test(name)));
      if (value === null || value === undefined) continue;
      const strength = Math.round(FULL * Math.min(1, Math.abs(value) / scale));
      token.classList.add(signed ? (value < 0 ? 'down' : 'up') : 'plain', `s${strength}`);
    }
  }

  function number(value) { return typeof value === 'number' ? String(value) : value; }
  function point(token) {
    if (!box || token === at) return;
    at?.classList.remove('at');
    at = token;
    at.classList.add('at');
    const i = Number(at.dataset.i);
    const step = at.closest('li').value;
    const facts = [`token ${i + 1}`, `step ${step}`, at.classList.contains('injected') ? 'injected' : 'sampled'];
    for (const [name, column] of Object.entries(columns)) {
      if (column[i] !== null && column[i] !== undefined) facts.push(`${name} ${number(column[i])}`);
      if (name === 'log-prob' && column[i] !== null) facts.push(`probability ${Math.exp(column[i]).toPrecision(4)}`);
    }
    box.querySelector('output').textContent = facts.join(' · ');
  }
  document.addEventListener('pointerover', (event) => { const token = event.target.closest?.('[data-i]'); if (token) point(token); });
  document.addEventListener('click', (event) => {
    const token = event.target.closest('[data-i]');
    if (token) point(token);
    const move = Number(event.target.closest('[data-move]')?.dataset.move);
    if (!move || !box) return;
    const all = [...box.querySelectorAll('[data-i]')];
    const next = all[at ? all.indexOf(at) + move : 0];
    if (next) { point(next); next.scrollIntoView({ block: 'nearest' }); }
  });

  // ---- formulas: those that KaTeX can't read stay as text
  function formulas() {
    for (const span of document.querySelectorAll('.formula:not([data-done])')) {
      span.dataset.done = '';
      const source = span.textContent;
      const made = document.createElement('span');
      try {
        katex.render(source, made, { displayMode: 'display' in span.dataset, throwOnError: true, trust: false, strict: 'ignore', maxExpand: 200, maxSize: 20, output: 'html' });
        made.title = source;
        span.replaceChildren(made);
      } catch { span.classList.add('unread'); }
    }
  }
  function all() { colour(); formulas(); }
  document.addEventListener('change', (event) => { if (event.target.id === 'colour') colour(); });
  document.addEventListener('treetune:changed', all);
  all();
})();
