// One's own note on an answer: saved without a reload, and what was typed stays until it is.
'use strict';
(() => {
  const WAIT_MS = 20000;
  const own = () => document.getElementById('own-note');
  const said = (form) => String(new URLSearchParams(new FormData(form)));
  let saving = false, again = false;

  async function save(form, goesOn = false) {
    if (saving) { again = true; return; }
    saving = true;
    again = false;
    const sent = said(form);
    try {
      const answer = await fetch(form.action, { method: 'POST', body: new URLSearchParams(sent), signal: AbortSignal.timeout(WAIT_MS) });
      const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
      const made = page.getElementById('notes');
      if (!made) throw new Error(`Not saved: ${page.querySelector('main .problem')?.textContent || page.body.textContent.trim()}`);
      if (said(form) === sent || !made.querySelector('.own-note')) {
        again = false;
        document.getElementById('notes').replaceWith(document.adoptNode(made));
        if (goesOn && document.querySelector('[data-on]')) document.querySelector('[data-key=j]')?.click();
      } else {  // something was typed meanwhile: it stays
        for (const name of ['seen', 'about']) form.elements[name].value = made.querySelector(`[name=${name}]`).value;
        if (!answer.ok) throw new Error(made.querySelector('.problem').textContent);
      }
    } catch (error) {
      again = false;
      problem(error instanceof TypeError || error.name === 'TimeoutError' ? `Not saved: ${error.message}` : error.message);
    } finally { saving = false; }
    if (again) await save(form, goesOn);
  }
  function problem(words) {
    let place = own().querySelector('.problem');
    if (!place) { place = document.createElement('p'); place.className = 'problem'; place.setAttribute('role', 'alert'); own().prepend(place); }
    place.textContent = words;
  }

  document.addEventListener('input', (event) => {
    const form = event.target.closest('.own-note');
    if (!form) return;
    own().dataset.kept = '';
    if (event.target.matches('[type=checkbox]')) save(form, event.target.checked);
  });
  document.addEventListener('submit', (event) => {
    if (!event.target.matches('.own-note')) return;
    event.preventDefault();
    save(event.target);
  });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey) && event.target.matches('.own-note textarea')) save(event.target.form);
  });
  addEventListener('beforeunload', (event) => { if (own() && 'kept' in own().dataset) event.preventDefault(); });
})();
